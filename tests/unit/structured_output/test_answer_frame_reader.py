"""What an `AnswerFrameReader` admits, with a vocabulary and a constraint of a few letters: the mask of a token, and whether it
is accepted, agree everywhere, and it does not matter how a text is cut into tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from inflight.interface.request import AnswerFrame
from inflight.structured_output.answer_frame_reader import AnswerFrameReader, Position, Section
from inflight.structured_output.backend import GrammarMatcher, MaskRow, num_mask_words
from inflight.structured_output.token_texts import TokenTexts
from tests.unit.structured_output.grammar_case import allowed_ids

LETTERS = "<>/tcynsa \n"
PIECES = [
    "<t",
    "<t>",
    "</t",
    "</t>",
    "t>",
    ">y",
    "</t>\n",
    "</t>y",
    "</t> \n",
    " <t>",
    "a</t>",
    "ys",
    "\n\n",
    "<c>a",
    "a<n",
    "n>",
    "<n>",
    "<t>a",
    "<t></t>",
    "<a>y",
    "<n><a>",
]
VOCABULARY = [piece.encode() for piece in (*LETTERS, *PIECES)] + [b"", b"<eos>"]
EMPTY, EOS = len(VOCABULARY) - 2, len(VOCABULARY) - 1
NUM_TOKENS = len(VOCABULARY) + 3  # the vocabulary of a model may be padded
TEXTS = TokenTexts(VOCABULARY, NUM_TOKENS, [EOS])


class OneOf(GrammarMatcher):
    """Admits a few whole texts."""

    def __init__(self, *texts: str) -> None:
        super().__init__(NUM_TOKENS, frozenset([EOS]))
        self._texts = [text.encode() for text in texts]
        self._written: list[bytes] = []

    def _leads_on(self, token_id: int) -> bool:
        text = VOCABULARY[token_id] if token_id < EMPTY else b""
        return bool(text) and any(each.startswith(b"".join(self._written) + text) for each in self._texts)

    def is_accepting(self) -> bool:
        return b"".join(self._written) in self._texts

    def error(self) -> str:
        return ""

    def _accept(self, token_id: int) -> bool:
        if is_admitted := self._leads_on(token_id):
            self._written.append(VOCABULARY[token_id])
        return is_admitted

    def _rollback(self, num_tokens: int) -> None:
        del self._written[len(self._written) - num_tokens :]

    def _fill_mask(self, row: MaskRow) -> None:
        ends = [EOS] if self.is_accepting() else []
        row[:] = TEXTS.row([*filter(self._leads_on, range(NUM_TOKENS)), *ends])


THINK = AnswerFrame(begin="<t>", end="</t>")
OPEN = AnswerFrame(begin="<t>", end="</t>", is_open=True)
CALLS = AnswerFrame(begin="<t>", end="</t>", calls=("<c>", "<tc>"))
ONLY_CALLS = AnswerFrame(begin="", end="", calls=("<c>",))
HEADERS = AnswerFrame(begin="<t>", end="</t>", answer="<a>", next_message="<n>", not_in_reasoning=("<n>", "<a>"))
NO_HEADER = AnswerFrame(begin="<t>", end="</t>", next_message="<n>", not_in_reasoning=("<n>",), calls=("<c>",))
FRAMES = [THINK, OPEN, CALLS, ONLY_CALLS, HEADERS, NO_HEADER]


def reader(frame: AnswerFrame, *, keeps_blanks: bool = False) -> AnswerFrameReader:
    return AnswerFrameReader(frame, TEXTS, keeps_blanks=keeps_blanks)


def read(each: AnswerFrameReader, token_ids: Sequence[int], *texts: str) -> tuple[Position | None, GrammarMatcher]:
    matcher, position = OneOf(*(texts or ("y", "ys", "<ta"))), each.start
    for token_id in token_ids:
        following = each.advance(position, token_id, matcher)
        if following is None:
            return None, matcher
        position = following
    return position, matcher


def mask_at(each: AnswerFrameReader, position: Position, matcher: GrammarMatcher) -> list[int]:
    row = np.full(num_mask_words(NUM_TOKENS), 0x5A5A5A5A, dtype=np.int32)
    each.fill(position, matcher, row)
    return [token_id for token_id in allowed_ids(row) if token_id < NUM_TOKENS]


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("keeps_blanks", [False, True])
def test_a_token_is_accepted_exactly_if_the_mask_allows_it(frame: AnswerFrame, keeps_blanks: bool) -> None:
    each = reader(frame, keeps_blanks=keeps_blanks)
    rng = random.Random(f"{frame}")
    seen: set[Position] = set()
    for _ in range(60):
        token_ids: list[int] = []
        for _ in range(9):
            position, matcher = read(each, token_ids)
            assert position is not None
            allowed = mask_at(each, position, matcher)
            if position.section is Section.FREE or matcher.is_terminated():
                assert allowed == list(range(NUM_TOKENS))
                break
            if position not in seen:
                seen.add(position)
                for token_id in range(len(VOCABULARY)):
                    if token_id == EMPTY:  # never drawn
                        continue
                    is_accepted = read(each, [*token_ids, token_id])[0] is not None
                    assert is_accepted == (token_id in allowed), (position, VOCABULARY[token_id])
            token_ids.append(rng.choice(allowed))
    assert {position.section for position in seen} >= {Section.ANSWER} | ({Section.REASONING} if frame.end else set())


def letters(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


Y = "y"  # what the constraint admits
WHOLE: list[tuple[AnswerFrame, bool, list[str], list[str]]] = [  # frame, keeps blanks, whole texts, texts that are not
    (
        THINK,
        False,
        ["y", "<t></t>y", "<t>a<t> </t y<</t>y", "<t></t> \n\ny", "<t>a</t>ys", "<ta"],
        ["", "<t>y", "<t></t>", "a", "yy", "<t></t><t></t>y", " y", "<t></t>y ", "<t></t> <t>"],
    ),
    (THINK, True, ["<t></t>y", "y"], ["<t></t> y", "<t></t>\ny", " y"]),
    (OPEN, False, ["</t>y", "a<t></t>\ny"], ["y", "", "</t>", "</t></t>y"]),
    (CALLS, False, ["y", "<c>", "<c>a y", "<tc>aa", "<t></t><c>a", "<t></t>\n<c>", "<t></t>y"], ["<c", "<t>y", "<c<c>"]),
    (ONLY_CALLS, False, ["y", "<c>a"], ["", "<t></t>y", "a"]),
    (HEADERS, False, ["y", "<a>y", "<t>a</t><n><a>y", "<t></t><n><t></t><n><a>y"], ["<t></t>y", "<t></t><n>y", "<t><n>"]),
    (HEADERS, False, ["<t>a<</t><n><a>y"], ["<t></t>\n<n><a>y", "<t></t><n>\n<a>y", "<a>", "<a><a>y", "<t>y<", "<t></t><a>y"]),
    (NO_HEADER, False, ["y", "<t></t><n>y", "<c>a"], ["<t></t>y", "<t></t><n><c>a", "<t></t><c>a", "<t>a<n>y</t>"]),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "keeps_blanks", "good", "bad"), WHOLE)
def test_whole_texts(frame: AnswerFrame, keeps_blanks: bool, good: list[str], bad: list[str]) -> None:
    each = reader(frame, keeps_blanks=keeps_blanks)
    found = []
    for text in (*good, *bad):
        position, _ = read(each, [*letters(text), EOS])
        if position is not None:
            found.append(text)
            assert position.section is Section.FREE or read(each, [*letters(text), EOS])[1].is_terminated()
    assert found == good


def cut(text: str, rng: random.Random) -> list[int]:
    """One way to write a text with the tokens of the vocabulary."""
    token_ids: list[int] = []
    while text:
        fits = [i for i, piece in enumerate(VOCABULARY[:EMPTY]) if text.startswith(piece.decode())]
        token_ids.append(rng.choice(fits))
        text = text.removeprefix(VOCABULARY[token_ids[-1]].decode())
    return token_ids


@pytest.mark.parametrize(("frame", "keeps_blanks", "good", "bad"), WHOLE)
def test_it_does_not_matter_how_a_text_is_cut(
    frame: AnswerFrame, keeps_blanks: bool, good: list[str], bad: list[str]
) -> None:
    """But a token must not go on from the frame into the constrained text, and blanks before a literal may be in its token."""
    each = reader(frame, keeps_blanks=keeps_blanks)
    for text in (*good, *bad):
        alone, matcher = read(each, letters(text))
        for token_ids in (cut(text, random.Random(i)) for i in range(20)):
            position, other = read(each, token_ids)
            if any(VOCABULARY[token_id] in (b"</t>y", b">y", b"<a>y") for token_id in token_ids):
                assert position is None or (position, other.is_accepting()) == (alone, matcher.is_accepting())
            elif not any(VOCABULARY[token_id].startswith(b" <") for token_id in token_ids):
                assert position == alone, token_ids
                assert position is None or other.is_accepting() == matcher.is_accepting()


def test_blanks_before_the_answer_are_bounded() -> None:
    each = reader(OPEN)
    blank, two = letters("\n")[0], VOCABULARY.index(b"\n\n")
    position, matcher = read(each, [*letters("</t>"), *[blank] * 63])
    assert position is not None and {blank, two} < set(mask_at(each, position, matcher))
    for last in (blank, two):
        position, matcher = read(each, [*letters("</t>"), *[blank] * 63, last])
        assert position is not None and not position.is_inside_answer
        assert not {blank, two} & set(mask_at(each, position, matcher))
        assert each.advance(position, blank, matcher) is None
        following = each.advance(position, letters("y")[0], matcher)
        assert following is not None and following.is_inside_answer


def test_a_token_may_begin_with_a_blank_before_a_literal() -> None:
    """As tokens of sentencepiece do."""
    position, _ = read(reader(THINK), [VOCABULARY.index(b" <t>")])
    assert position == read(reader(THINK), letters("<t>"))[0]


def test_the_literal_wins_over_the_constrained_text() -> None:
    each = reader(THINK)
    for text, section in (("<t", Section.ANSWER), ("<t>", Section.REASONING), ("<ta", Section.ANSWER)):
        position, matcher = read(each, letters(text), "<t>y", "<ta")
        assert position is not None and position.section is section
        assert position.is_inside_answer == (text == "<ta")
        assert matcher.num_accepted == (0 if section is Section.REASONING else len(text))
