"""`FreeTextReader`: where it finds reasoning in a text without a constraint, and what it refuses where none may begin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from inflight.interface.request import AnswerFrame
from inflight.structured_output.answer_frame_reader import UNLIMITED, Position, Section
from inflight.structured_output.backend import num_mask_words
from inflight.structured_output.free_text_reader import FREE_TEXT, FreeMatcher, FreeTextReader, free_grammar
from inflight.structured_output.token_texts import TokenTexts
from tests.unit.structured_output.grammar_case import allowed_ids

PIECES = [
    *'<>/tacymf \n`"{[',
    "<t>",
    "</t>",
    "<t>a",
    "a</t>y",
    " <t>",
    "<m>",
    "<a>",
    "</t><m>",
    "<m><t",
    "<f>",
    "<eos>",
    "",
]
EOS = PIECES.index("<eos>")
TEXTS = TokenTexts([piece.encode() for piece in PIECES], len(PIECES) + 3, [EOS])
TAGS = AnswerFrame(begin="<t>", end="</t>")
OPEN = AnswerFrame(begin="<t>", end="</t>", is_open=True)
CALLS = AnswerFrame(begin="<t>", end="</t>", calls=("<f>",))
ONLY_END = AnswerFrame(begin="", end="</t>", is_open=True)
MESSAGES = AnswerFrame(begin="<m>a<t>", end="</t>", answer="<m>f<t>", next_message="<n>")


def tokens(text: str) -> list[int]:
    """Each character, but the EOS, as a token of its own."""
    head, eos, rest = text.partition("<eos>")
    return [PIECES.index(letter) for letter in head] + ([EOS, *tokens(rest)] if eos else [])


def read(frame: AnswerFrame, token_ids: Sequence[int]) -> Position:
    reader = FreeTextReader(frame, TEXTS)
    position = reader.start
    for token_id in token_ids:
        following = reader.advance(position, token_id, FreeMatcher())
        assert following is not None
        position = following
    return position


@pytest.mark.parametrize(
    ("frame", "text", "section"),
    [
        (TAGS, "", Section.ANSWER),
        (TAGS, "<t", Section.ANSWER),
        (TAGS, "<t>", Section.REASONING),
        (TAGS, " \n<t>a</t", Section.REASONING),
        (TAGS, "<t>a</t>", Section.ANSWER),
        (TAGS, "<t>a</t><t>", Section.REASONING),
        (TAGS, "a", Section.ANSWER),
        (TAGS, "a<t>", Section.REASONING),  # reasoning may come again behind text
        (TAGS, "a<t>a</t>a", Section.ANSWER),
        (TAGS, "a<t>a</t>a<t>", Section.REASONING),
        (TAGS, "a `<t>", Section.ANSWER),  # a quotation
        (TAGS, "a `<t>` <t>", Section.REASONING),
        (TAGS, '"<t>', Section.ANSWER),
        (TAGS, "```\n<t>", Section.ANSWER),
        (TAGS, "```\na\n```\n<t>", Section.REASONING),
        (TAGS, "<t>a</t>```\n<t>a</t>", Section.ANSWER),
        (TAGS, "<t<t>", Section.REASONING),
        (CALLS, "a<f><t>", Section.FREE),  # the arguments of a call
        (CALLS, "<t>a</t>a<f>", Section.FREE),
        (CALLS, "<t>a<f></t>a<t>", Section.REASONING),
        (TAGS, "<t>a</t>\n{<t>", Section.FREE),
        (TAGS, " [<t>", Section.FREE),
        (TAGS, "a {<t>", Section.REASONING),
        (TAGS, "<t>a<eos>a", Section.REASONING),  # with ignore_eos a text goes on
        (TAGS, "<eos><t>", Section.REASONING),
        (OPEN, "", Section.REASONING),
        (OPEN, "a</t>", Section.ANSWER),
        (ONLY_END, "<t>", Section.REASONING),
        (ONLY_END, "</t>", Section.FREE),
        (MESSAGES, "<m>a<t>", Section.REASONING),
        (MESSAGES, "<m>a<t>a</t>", Section.ANSWER),
        (MESSAGES, "<m>f<t>a</t><m>a<t>", Section.REASONING),
        (MESSAGES, "<m>a<t></t>y<m>a<t>a", Section.REASONING),
    ],
)
def test_where_the_reasoning_is(frame: AnswerFrame, text: str, section: Section) -> None:
    assert read(frame, tokens(text)).section is section


def test_tags_may_be_anywhere_in_tokens() -> None:
    def section(frame: AnswerFrame, *pieces: str) -> Section:
        return read(frame, [PIECES.index(piece) for piece in pieces]).section

    assert section(TAGS, "<t>a") is Section.REASONING
    assert section(TAGS, " <t>") is Section.REASONING
    assert section(TAGS, "<t>a", "a</t>y") is Section.ANSWER
    assert section(TAGS, "<t>a", "a</t>y", "<", "t", ">", "a") is Section.REASONING
    assert section(TAGS, "y", "<t>a", "a</t>y", " <t>") is Section.REASONING
    assert section(CALLS, "y", "<", "f", ">", "<t>a") is Section.FREE
    assert section(MESSAGES, "<m>", "a", "<t>a", "</t><m>", "a", "<t>") is Section.REASONING
    assert section(MESSAGES, "<m>", "a", "<t>a", "</t><m>", "a", "y") is Section.ANSWER


def refused(frame: AnswerFrame, text: str) -> set[str]:
    """The tokens that the mask does not allow if no reasoning may begin after the text. `advance` must agree."""
    reader = FreeTextReader(frame, TEXTS)
    position = reader.start
    for token_id in tokens(text):
        following = reader.advance(reader.without_thoughts(position), token_id, FreeMatcher())
        assert following is not None
        position = following
    position = reader.without_thoughts(position)
    row = np.full(num_mask_words(len(PIECES) + 3), 0x5A5A5A5A, dtype=np.int32)
    reader.fill(position, FreeMatcher(), row)
    allowed = set(allowed_ids(row))
    found = {piece for token_id, piece in enumerate(PIECES) if token_id not in allowed}
    assert found == {piece for i, piece in enumerate(PIECES) if reader.advance(position, i, FreeMatcher()) is None}
    return found


def test_no_reasoning_begins_where_none_may() -> None:
    assert refused(TAGS, "") == {"<t>", "<t>a", " <t>"}
    assert refused(TAGS, " ") == {"<t>", "<t>a", " <t>"}
    assert refused(TAGS, "<t") == {">"}
    assert refused(TAGS, "a") == set()
    assert refused(MESSAGES, "") == set()
    assert refused(MESSAGES, "<m>") == {"a", "a</t>y"}  # an answer begins with the same "<m>"
    assert refused(MESSAGES, "<m>f<t>a</t><m>") == {"a", "a</t>y"}
    assert refused(MESSAGES, "yy<m>y") == set()


def test_every_token_is_free_where_reasoning_may_begin() -> None:
    for frame in (TAGS, OPEN, MESSAGES):
        reader = FreeTextReader(frame, TEXTS)
        row = np.zeros(num_mask_words(len(PIECES) + 3), dtype=np.int32)
        reader.fill(reader.start, FreeMatcher(), row)
        assert set(row.tolist()) == {-1}
        assert reader.num_free(reader.start) == UNLIMITED
        assert not reader.forced(reader.start)


def test_nothing_is_compiled_for_a_free_text() -> None:
    future = free_grammar()
    matcher = future.result(0).matcher()
    assert not matcher.is_terminated() and matcher.is_accepting() and not matcher.error()
    assert FREE_TEXT.kind == "free_text"
