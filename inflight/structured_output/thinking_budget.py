"""`ThinkingBudget`: bounds the reasoning of a text to a number of tokens, and then forces a text that closes it.

It counts the tokens of the reasoning, in all its parts together. Tags do not count. When the budget is spent, only the next
token of the closing text is admitted, until this text is complete. Then the text goes on as after reasoning that the model has
closed itself, but no more reasoning may begin with the text, or with a further message. If the budget is spent in the middle of
a character, the model may complete the character first.

Reasoning that comes again behind text may have `MOST_BEHIND_TEXT` tokens more than the budget, in all its parts together. So an
answer needs no masks only because an opening tag might come in it.

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

MOST_BEHIND_TEXT = 16


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
        num_thoughts = position.num_thoughts
        num_closing = 0
        num_granted = position.num_granted
        if following.section is Section.REASONING:
            if position.section is Section.REASONING:
                num_thoughts += not forced
            elif position.quoting is not None:
                num_granted = self._num_granted(num_thoughts)
            num_closing = position.num_closing + bool(forced)
            if num_closing == len(self._closing):  # it does not close this reasoning
                return None
        section, literals, seen, num_blanks, is_answer, _, _, may_think, _, quoting = following
        # not `_replace`, which takes three times as long
        counted = Position(
            section, literals, seen, num_blanks, is_answer, num_thoughts, num_closing, may_think, num_granted, quoting
        )
        return self._bounded(counted)

    def fill(self, position: Position, matcher: GrammarMatcher, row: MaskRow) -> None:
        if forced := self.forced(position):
            allow_only(row[None], forced)
        else:
            self._reader.fill(position, matcher, row)

    def without_thoughts(self, position: Position) -> Position:
        return self._reader.without_thoughts(position)

    def forced(self, position: Position) -> Sequence[int]:
        num_more = position.num_thoughts - self._budget - position.num_granted
        if position.section is not Section.REASONING or num_more < 0:
            return ()
        if not position.num_closing and num_more < MAX_CHARACTER_BYTES - 1 and _ends_within_character(position.seen):
            return ()
        return self._closing[position.num_closing :]

    def num_free(self, position: Position) -> int:
        if position.section is Section.FREE:
            return UNLIMITED
        num_granted = position.num_granted
        if position.section is Section.ANSWER and position.quoting is not None:
            num_granted = self._num_granted(position.num_thoughts)
        return min(self._reader.num_free(position), max(self._budget + num_granted - position.num_thoughts, 0))

    def _num_granted(self, num_thoughts: int) -> int:
        """How many tokens beyond the budget reasoning may have that begins behind text now. It then has at least
        `MOST_BEHIND_TEXT` tokens, unless earlier parts have used them."""
        return min(max(num_thoughts + MOST_BEHIND_TEXT - self._budget, 0), MOST_BEHIND_TEXT)

    def _bounded(self, position: Position) -> Position:
        is_spent = position.num_thoughts >= self._budget and position.quoting is None
        if position.section is Section.ANSWER and is_spent:
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
