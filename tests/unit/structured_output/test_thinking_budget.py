"""`ThinkingBudget`: reasoning of at most so many tokens, then the closing text; nothing else changes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from inflight.interface.request import AnswerFrame
from inflight.structured_output.answer_frame_reader import FrameReader, Position, Section
from inflight.structured_output.backend import GrammarMatcher, num_mask_words
from inflight.structured_output.free_text_reader import FreeMatcher, FreeTextReader
from inflight.structured_output.thinking_budget import MOST_BEHIND_TEXT, ThinkingBudget
from inflight.structured_output.token_texts import TokenTexts
from tests.unit.structured_output.grammar_case import allowed_ids
from tests.unit.structured_output.test_answer_frame_reader import (
    CALLS,
    EMPTY,
    EOS,
    HEADERS,
    NO_HEADER,
    NUM_TOKENS,
    OPEN,
    TEXTS,
    THINK,
    VOCABULARY,
    OneOf,
    letters,
    mask_at,
    reader,
)

FRAMES = [THINK, OPEN, CALLS, HEADERS, NO_HEADER]
CLOSING = (*letters("a"), VOCABULARY.index(b"</t>"))  # a message of one token, and the tag


def bounded(frame: AnswerFrame, budget: int, closing: tuple[int, ...] = CLOSING, *, is_free: bool) -> ThinkingBudget:
    inner = FreeTextReader(frame, TEXTS) if is_free else reader(frame)
    return ThinkingBudget(inner, replace(frame, max_reasoning_tokens=budget, closing_token_ids=closing))


def new_matcher(is_free: bool) -> GrammarMatcher:
    return FreeMatcher() if is_free else OneOf("y", "ys", "<ta")


def draw(each: FrameReader, is_free: bool, rng: random.Random, length: int) -> list[tuple[Position, int, list[int]]]:
    """A text of drawn tokens: for each its position before it, the token, and what the mask allowed there."""
    matcher, position, found = new_matcher(is_free), each.start, []
    for _ in range(length):
        if matcher.is_terminated():
            break
        allowed = [token_id for token_id in mask_at(each, position, matcher) if token_id < EMPTY or token_id == EOS]
        begins = [token_id for token_id in allowed if VOCABULARY[token_id] == b"<t>"]
        likely = [token_id for token_id in allowed if b"</t>" not in VOCABULARY[token_id] and token_id != EOS]
        choices = begins if rng.random() < 0.3 else likely if rng.random() < 0.7 else allowed
        token_id = rng.choice(choices or allowed)
        found.append((position, token_id, allowed))
        following = each.advance(position, token_id, matcher)
        assert following is not None
        position = following
    return found


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_token_is_accepted_exactly_if_the_mask_allows_it(frame: AnswerFrame, is_free: bool, budget: int) -> None:
    each = bounded(frame, budget, is_free=is_free)
    for seed in range(8):
        matcher = new_matcher(is_free)
        for position, token_id, allowed in draw(each, is_free, random.Random(seed), 9):
            for other in (token_id for token_id in range(len(VOCABULARY)) if token_id != EMPTY):
                before = matcher.num_accepted
                is_accepted = each.advance(position, other, matcher) is not None
                assert is_accepted == (other in allowed), (position, VOCABULARY[other])
                if is_accepted and matcher.num_accepted < before:  # a literal came instead of the constrained text
                    matcher = _follow(each, is_free, seed, position)
                matcher.rollback(max(matcher.num_accepted - before, 0))
            assert each.advance(position, token_id, matcher) is not None


def _follow(each: FrameReader, is_free: bool, seed: int, until: Position) -> GrammarMatcher:
    """A matcher at a position of a drawn text."""
    matcher = new_matcher(is_free)
    for position, token_id, _ in draw(each, is_free, random.Random(seed), 9):
        if position is until or position == until:
            return matcher
        each.advance(position, token_id, matcher)
    raise AssertionError(until)


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize("frame", FRAMES)
def test_until_the_budget_is_spent_everything_is_as_without_one(frame: AnswerFrame, is_free: bool) -> None:
    plain = FreeTextReader(frame, TEXTS) if is_free else reader(frame)
    each, num_cut = bounded(frame, 4, is_free=is_free), 0
    for seed in range(40):
        matcher, position, num_thoughts = new_matcher(is_free), each.start, 0
        for before, token_id, allowed in draw(plain, is_free, random.Random(seed), 14):
            spent = num_thoughts >= 4
            if spent and before.section is Section.REASONING and not position.num_granted:
                num_cut += 1
                assert mask_at(each, position, matcher) == [CLOSING[0]]
                break
            if spent and (before.section is Section.ANSWER or position.num_granted):
                break  # no more reasoning may begin, or only a little
            assert [i for i in mask_at(each, position, matcher) if i < EMPTY or i == EOS] == allowed
            following, unbounded = (
                each.advance(position, token_id, matcher),
                plain.advance(before, token_id, new_matcher(is_free)),
            )
            assert following is not None
            is_thought = before.section is following.section is Section.REASONING
            num_thoughts += is_thought
            assert following.num_thoughts == num_thoughts
            position = following
            assert unbounded is None or unbounded.section is position.section or not is_free
    assert num_cut > 5


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("budget", [0, 1, 4])
def test_no_text_has_more_reasoning(frame: AnswerFrame, is_free: bool, budget: int) -> None:
    each, num_closed = bounded(frame, budget, is_free=is_free), 0
    for seed in range(40):
        drawn = draw(each, is_free, random.Random(seed), 20)
        thoughts, i = 0, 0
        while i < len(drawn):
            position = drawn[i][0]
            following = drawn[i + 1][0] if i + 1 < len(drawn) else None
            if each.forced(position):
                num_closed += 1
                rest = drawn[i : i + len(CLOSING)]
                assert thoughts == budget + position.num_granted
                assert [token_id for _, token_id, _ in rest] == list(CLOSING[: len(rest)])
                assert all(len(allowed) == 1 for _, _, allowed in rest)
                i += len(rest)
                if i < len(drawn):
                    assert drawn[i][0].section is not Section.REASONING
                if position.quoting is not None:
                    continue  # reasoning may come again behind text
                assert all(position.section is not Section.REASONING for position, *_ in drawn[i:])
                break
            thoughts += following is not None and position.section is following.section is Section.REASONING
            i += 1
        assert thoughts <= budget + MOST_BEHIND_TEXT * (is_free and not frame.next_message)
    assert num_closed > 5 or (budget == 0 and not frame.is_open)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("budget", [0, 2, 5])
def test_free_tokens_need_no_mask(frame: AnswerFrame, budget: int) -> None:
    """Whatever the tokens are: every mask before `num_free` tokens allows all."""
    each, rng, num_free = bounded(frame, budget, is_free=True), random.Random(budget), 0
    everything = list(range(NUM_TOKENS))
    for _ in range(30):
        position: Position | None = each.start
        promised = 0
        for _ in range(14):
            assert position is not None
            promised = max(promised - 1, each.num_free(position))
            allowed = mask_at(each, position, FreeMatcher())
            if promised > 0:
                num_free += 1
                assert allowed == everything
            choice = rng.choice([i for i in allowed if i < EMPTY])
            if promised > 0 and rng.random() < 0.3:
                choice = VOCABULARY.index(b"<t>")
            position = each.advance(position, choice, FreeMatcher())
    assert num_free > 50 or budget == 0


def test_a_budget_of_none_closes_open_reasoning_at_once_and_lets_none_begin() -> None:
    each = bounded(OPEN, 0, CLOSING[1:], is_free=True)
    assert list(each.forced(each.start)) == [CLOSING[1]]
    for is_free in (False, True):
        each = bounded(THINK, 0, is_free=is_free)
        assert not each.forced(each.start)
        allowed = mask_at(each, each.start, new_matcher(is_free))
        assert not {VOCABULARY.index(b"<t>"), VOCABULARY.index(b" <t>"), VOCABULARY.index(b"<t>a")} & set(allowed)
        assert letters("y")[0] in allowed


def test_reasoning_that_comes_again_behind_text_is_bounded() -> None:
    """Its tokens count together with those before. Behind the budget it has a few."""
    for budget, num_first in ((0, 0), (3, 3), (3, 1), (40, 1), (40, 30)):
        each = bounded(OPEN, budget, is_free=True)
        position: Position | None = each.start
        written = [*letters("a") * num_first, CLOSING[1], *letters("ya"), VOCABULARY.index(b"<t>")]
        if num_first == budget:
            written[num_first:num_first] = CLOSING[:-1]
        for token_id in written:
            assert position is not None
            position = each.advance(position, token_id, FreeMatcher())
        num_again = 0
        while position is not None and not each.forced(position):
            position = each.advance(position, letters("a")[0], FreeMatcher())
            num_again += 1
        assert num_again == max(budget - num_first, MOST_BEHIND_TEXT)
        for token_id in CLOSING:
            assert position is not None and each.forced(position)[0] == token_id
            position = each.advance(position, token_id, FreeMatcher())
        assert position is not None and position.section is Section.ANSWER
        # nothing is left for one more, but the text goes on
        is_used_up = num_first + num_again == budget + MOST_BEHIND_TEXT
        assert (each.num_free(position) == 0) == is_used_up
        assert mask_at(each, position, FreeMatcher()) == list(range(NUM_TOKENS))
        again = each.advance(position, VOCABULARY.index(b"<t>"), FreeMatcher())
        assert again is not None and bool(each.forced(again)) == is_used_up


def test_a_text_that_does_not_close_the_reasoning_is_an_error_and_not_endless() -> None:
    each = bounded(OPEN, 1, tuple(letters("aa")), is_free=True)
    position: Position | None = each.start
    for token_id in letters("aa"):
        assert position is not None
        position = each.advance(position, token_id, FreeMatcher())
    assert position is not None and each.advance(position, letters("a")[0], FreeMatcher()) is None


LATIN = "aü東🙂"
BYTES = [bytes([byte]) for byte in range(256)] + [b"</t>", b"<eos>"]


@pytest.mark.parametrize("character", LATIN)
def test_a_character_is_completed_before_the_reasoning_is_closed(character: str) -> None:
    texts = TokenTexts(BYTES, len(BYTES), [257])
    frame = replace(OPEN, max_reasoning_tokens=3, closing_token_ids=(256,))
    each = ThinkingBudget(FreeTextReader(OPEN, texts), frame)
    for shift in range(3):
        written = b"bcd"[:shift] + character.encode() * 3
        position: Position | None = each.start
        taken = 0
        while position is not None and not each.forced(position):
            position = each.advance(position, written[taken], FreeMatcher())
            taken += 1
        assert 3 <= taken <= 6
        assert written[:taken].decode()  # whole characters


def test_bytes_that_are_no_text_cannot_delay_the_end() -> None:
    texts = TokenTexts(BYTES, len(BYTES), [257])
    each = ThinkingBudget(FreeTextReader(OPEN, texts), replace(OPEN, max_reasoning_tokens=2, closing_token_ids=(256,)))
    for byte in (0x80, 0xC3, 0xF0, 0xFF):
        position: Position | None = each.start
        taken = 0
        while position is not None and not each.forced(position):
            position = each.advance(position, byte, FreeMatcher())
            taken += 1
        assert 2 <= taken <= 5


def test_the_mask_of_a_closing_token_allows_only_it() -> None:
    each = bounded(OPEN, 0, is_free=False)
    row = np.full(num_mask_words(NUM_TOKENS), 0x5A5A5A5A, dtype=np.int32)
    each.fill(each.start, OneOf("y"), row)
    assert allowed_ids(row) == [CLOSING[0]]
