"""Every family's reasoning can be bounded: what is written after a cut is read as the same reasoning, and as an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.interface.events import ContentDelta, ReasoningDelta
from inflight.parsers.reasoning import Opening, answer_frame
from inflight.parsers.reasoning_families import REASONING
from inflight.parsers.selector import create_output_parser
from inflight.structured_output.answer_frame_reader import Section
from inflight.structured_output.free_text_reader import FreeMatcher, FreeTextReader
from inflight.structured_output.thinking_budget import MOST_BEHIND_TEXT, ThinkingBudget
from inflight.structured_output.token_texts import TokenTexts

EOS = 256
BYTES = [bytes([byte]) for byte in range(256)] + [b"<eos>"]  # each byte is a token: the tags have many
TEXTS = TokenTexts(BYTES, len(BYTES), [EOS])
MESSAGE, BUDGET = "Enough.", 9
THOUGHT = "I think, and think, and think again about all of it. " * 3


@pytest.mark.parametrize("opening", [Opening.NONE, Opening.OPEN])
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_cut_and_an_answer_follows(name: str, opening: Opening) -> None:
    markup = REASONING[name]
    frame = answer_frame(markup, opening, is_constrained=False)
    assert frame is not None
    closing = (MESSAGE + frame.end).encode()
    frame = replace(frame, max_reasoning_tokens=BUDGET, closing_token_ids=tuple(closing))
    each = ThinkingBudget(FreeTextReader(frame, TEXTS), frame)
    wanted = ("" if opening is Opening.OPEN or markup.starts_inside else frame.begin) + THOUGHT
    position, written = each.start, b""
    while not each.forced(position):  # the model writes what it wants
        following = each.advance(position, wanted.encode()[len(written)], FreeMatcher())
        assert following is not None
        written += wanted.encode()[len(written) : len(written) + 1]
        position = following
    while forced := each.forced(position):
        following = each.advance(position, forced[0], FreeMatcher())
        assert following is not None
        written += BYTES[forced[0]]
        position = following
    assert position.section is not Section.REASONING
    answer = (frame.next_message + frame.answer).encode() + b"The answer."
    for byte in answer:
        following = each.advance(position, byte, FreeMatcher())
        assert following is not None
        position = following
    parser = create_output_parser(None, name, tools=None, opening=opening)
    events = [*parser.push((written + answer).decode()), *parser.finish()]
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    assert thought == THOUGHT[:BUDGET] + MESSAGE
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "The answer."


@pytest.mark.parametrize("name", [name for name, markup in REASONING.items() if markup.whole_parser is None])
def test_reasoning_that_comes_again_is_cut_where_the_parser_reads_it(name: str) -> None:
    markup = REASONING[name]
    frame = answer_frame(markup, Opening.OPEN, is_constrained=False)
    assert frame is not None
    closing = (MESSAGE + frame.end).encode()
    frame = replace(frame, max_reasoning_tokens=60, closing_token_ids=tuple(closing))
    each = ThinkingBudget(FreeTextReader(frame, TEXTS), frame)
    wanted = f"Hm.{markup.end}It `{markup.begin}`.\nOr: {markup.begin}{THOUGHT}".encode()
    position, written = each.start, b""
    while not written.endswith(closing):
        byte = (each.forced(position) or wanted)[0]
        wanted = wanted if each.forced(position) else wanted[1:]
        following = each.advance(position, byte, FreeMatcher())
        assert following is not None
        position, written = following, written + bytes([byte])
    parser = create_output_parser(None, name, tools=None, opening=Opening.OPEN)
    events = [*parser.push(written.decode() + " So."), *parser.finish()]
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    num_more = max(
        61 - len(f"Hm.{markup.end}".encode()), MOST_BEHIND_TEXT
    )  # the bytes of a tag count until it is complete
    assert thought == f"Hm.\n\n{THOUGHT[:num_more]}{MESSAGE}"
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    assert content.split() == f"It `{markup.begin}`. Or: So.".split()


@pytest.mark.parametrize("name", REASONING)
def test_no_reasoning_begins_with_a_budget_of_none(name: str) -> None:
    markup = REASONING[name]
    frame = answer_frame(markup, is_constrained=False)
    assert frame is not None
    frame = replace(frame, max_reasoning_tokens=0, closing_token_ids=tuple(frame.end.encode()))
    each = ThinkingBudget(FreeTextReader(frame, TEXTS), frame)
    if markup.starts_inside:
        assert bytes(each.forced(each.start)) == frame.end.encode()
        return
    position = each.start
    for i, byte in enumerate(frame.begin.encode()):
        following = each.advance(position, byte, FreeMatcher())
        if following is None:
            assert not frame.answer.startswith(frame.begin[: i + 1])
            return
        position = following
    raise AssertionError("the reasoning has begun")
