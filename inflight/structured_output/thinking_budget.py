"""`ThinkingBudget`: bounds the reasoning of a text to a number of tokens, and then forces a text that closes it.

It counts the tokens of the reasoning, in all its parts together. Tags do not count. When the budget is spent, only the next
token of the closing text is admitted, until this text is complete. Then the text goes on as after reasoning that the model has
closed itself, but no more reasoning may begin. If the budget is spent in the middle of a character, the model may complete the
character first.

Until the budget is spent, every token is admitted that is admitted without a budget. So a text whose reasoning is shorter is
the same with a budget and without one.
"""

from collections.abc import Sequence

from inflight.interface.request import AnswerFrame
from inflight.structured_output.answer_frame_reader import (
    MAX_CHARACTER_BYTES,
    UNLIMITED,
    FrameReader,
    Position,
    Section,
)
from inflight.structured_output.backend import GrammarMatcher, MaskRow, allow_only


class ThinkingBudget(FrameReader):
    """One for a request.

    Args:
        reader: reads the frame without the budget.
        frame: has the budget and the closing text.
    """

    def __init__(self, reader: FrameReader, frame: AnswerFrame) -> None:
        assert frame.max_reasoning_tokens is not None and frame.closing_token_ids
        self._reader = reader
        self._budget = frame.max_reasoning_tokens
        self._closing = frame.closing_token_ids
        self.start = self._bounded(reader.start)

    def advance(self, position: Position, token_id: int, matcher: GrammarMatcher) -> Position | None:
        if position.section is Section.FREE:
            return position
        forced = self.forced(position)
        if forced and token_id != forced[0]:
            return None
        following = self._reader.advance(position, token_id, matcher)
        if following is None:
            return None
        num_thoughts, num_closing = position.num_thoughts, 0
        if following.section is Section.REASONING:
            num_thoughts += position.section is Section.REASONING and not forced
            num_closing = position.num_closing + bool(forced)
            if num_closing == len(self._closing):  # it does not close this reasoning
                return None
        section, literals, seen, num_blanks, is_answer, _, _, may_think = following
        # not `_replace`, which takes three times as long
        counted = Position(section, literals, seen, num_blanks, is_answer, num_thoughts, num_closing, may_think)
        return self._bounded(counted)

    def fill(self, position: Position, matcher: GrammarMatcher, row: MaskRow) -> None:
        if forced := self.forced(position):
            allow_only(row[None], forced)
        else:
            self._reader.fill(position, matcher, row)

    def without_thoughts(self, position: Position) -> Position:
        return self._reader.without_thoughts(position)

    def forced(self, position: Position) -> Sequence[int]:
        if position.section is not Section.REASONING or position.num_thoughts < self._budget:
            return ()
        num_more = position.num_thoughts - self._budget
        if not position.num_closing and num_more < MAX_CHARACTER_BYTES - 1 and _ends_within_character(position.seen):
            return ()
        return self._closing[position.num_closing :]

    def num_free(self, position: Position) -> int:
        if position.section is Section.FREE:
            return UNLIMITED
        return min(self._reader.num_free(position), max(self._budget - position.num_thoughts, 0))

    def _bounded(self, position: Position) -> Position:
        if position.section is Section.ANSWER and position.num_thoughts >= self._budget:
            return self._reader.without_thoughts(position)
        return position


def _ends_within_character(text: bytes) -> bool:
    """Whether the text ends with the beginning of a character in UTF-8, which further bytes may complete."""
    for num_bytes, byte in enumerate(reversed(text[-MAX_CHARACTER_BYTES + 1 :]), 1):
        if byte >= 0xC0:
            return num_bytes < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
