"""`AnswerFrameReader`: reads the `AnswerFrame` of a constrained text: where reasoning is, and where the constraint begins.

A text has these sections, one after another:

    ANSWER      what the constraint describes. It may be preceded by a literal of the frame, or by blanks after the reasoning.
    REASONING   free text up to `end`; then ANSWER again, or with `next_message` the literals of the next message
    FREE        a call instead of the answer, or an answer without a constraint: every token is admitted, up to the end

At the beginning of ANSWER a literal may come, or the constrained text may begin. The reader keeps both possibilities until a
token decides. If a literal is complete, it counts as the literal.

Which section a token belongs to depends only on the tokens before it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from inflight.interface.request import AnswerFrame
from inflight.structured_output.backend import ALL_ALLOWED, GrammarMatcher, MaskRow
from inflight.structured_output.quoting import Quoting
from inflight.structured_output.spec import MAX_WHITESPACE
from inflight.structured_output.token_texts import BLANKS, TokenTexts

MAX_CHARACTER_BYTES = 4  # of UTF-8
UNLIMITED = 2**62  # more tokens than a text has


class Section(Enum):
    ANSWER = auto()
    REASONING = auto()
    FREE = auto()


class Position(NamedTuple):
    """Where a text is in its frame.

    Attributes:
        literals: in ANSWER the literals that may still be complete next; empty as soon as it is certain that none comes.
        seen: in ANSWER the bytes of a literal so far, in REASONING the last bytes.
        num_blanks: the bytes of white space between the reasoning and the answer; -1 if none is allowed.
        is_answer: in ANSWER, whether the constraint admits the tokens since the beginning of the section.
        num_thoughts, num_closing: counted by `ThinkingBudget` only: the tokens of reasoning so far, and how many tokens of the
            forced closing text stand at the end of the text.
        may_think: whether reasoning may begin in ANSWER.
        num_granted: set by `ThinkingBudget` only: how many tokens the reasoning may have beyond the budget.
        quoting: of the text before an opening tag that may come next, where reasoning may come again behind text; None if it
            may not.
    """

    section: Section
    literals: tuple[tuple[bytes, Section], ...] = ()
    seen: bytes = b""
    num_blanks: int = -1
    is_answer: bool = True
    num_thoughts: int = 0
    num_closing: int = 0
    may_think: bool = True
    num_granted: int = 0
    quoting: Quoting | None = None

    @property
    def is_inside_answer(self) -> bool:
        """Whether it is certain that the next token belongs to the constrained text, or ends it."""
        return self.section is Section.ANSWER and not self.literals and self.num_blanks < 0


@dataclass(slots=True)
class _Cached:
    """Masks that were needed before, by what they depend on."""

    literal: dict[tuple[tuple[tuple[bytes, Section], ...], bytes], MaskRow]
    reasoning: dict[bytes, MaskRow]


class FrameReader(ABC):
    """Reads texts of one kind of frame. A reader has no state: any number of texts may be read with it.

    Attributes:
        start: the position of an empty text.
    """

    start: Position

    @abstractmethod
    def advance(self, position: Position, token_id: int, matcher: GrammarMatcher) -> Position | None:
        """Returns the position after one more token, or None if the token is not admitted. `matcher` follows the constrained
        text. If a literal comes instead of this text, the matcher is rolled back to its beginning."""

    @abstractmethod
    def fill(self, position: Position, matcher: GrammarMatcher, row: MaskRow) -> None:
        """Write the mask of the next token."""

    @abstractmethod
    def without_thoughts(self, position: Position) -> Position:
        """Returns a position in ANSWER that differs from the given one in this: no reasoning may begin."""

    def forced(self, position: Position) -> Sequence[int]:
        """The tokens that the frame itself forces next, if it does."""
        return ()

    def num_free(self, position: Position) -> int:
        """A number of next tokens that certainly need no mask, because every token is admitted."""
        return UNLIMITED if position.section is Section.FREE else 0


class AnswerFrameReader(FrameReader):
    """One for a frame and a vocabulary; any number of texts may be read with it, by one thread.

    Args:
        keeps_blanks: whether the constraint describes the text after the reasoning to the character. Otherwise white space may
            stand between the reasoning and the answer.
    """

    def __init__(self, frame: AnswerFrame, texts: TokenTexts, *, keeps_blanks: bool) -> None:
        self._texts = texts
        self._end = frame.end.encode()
        self._inner = [literal.encode() for literal in frame.not_in_reasoning]
        self._is_exact = keeps_blanks or bool(frame.next_message)
        # a longer text cannot be the beginning of one of them, or of a character
        self._num_kept = max(MAX_CHARACTER_BYTES, *map(len, [self._end, *self._inner])) - 1
        literals = [
            (frame.begin, Section.REASONING),
            (frame.answer, Section.ANSWER),
            *((call, Section.FREE) for call in frame.calls),
        ]
        first = [(text.encode(), section) for text, section in literals if text]
        later = [(frame.next_message.encode() + text, section) for text, section in first]
        if frame.next_message and not frame.answer:
            later = [(frame.next_message.encode(), Section.ANSWER)]
        self._needs_literal = bool(frame.next_message)  # after the reasoning
        self._after_reasoning = tuple(
            later if self._needs_literal else [each for each in first if each[1] is Section.FREE]
        )
        self.start = Position(Section.REASONING) if frame.is_open else Position(Section.ANSWER, tuple(first))
        self._cached = _Cached({}, {})
        # tokens that contain the whole end, or a text that must not be in reasoning: few, and found by a search of all tokens
        ends = texts.containing(self._end) if self._end else []
        self._always_forbidden = [token_id for token_id, rest in ends if not self._may_follow_end(rest)]
        self._always_forbidden += [token_id for literal in self._inner for token_id, _ in texts.containing(literal)]

    def advance(self, position: Position, token_id: int, matcher: GrammarMatcher) -> Position | None:
        text = self._texts.bytes_of(token_id)
        if position.section is Section.FREE:
            return position
        if position.section is Section.REASONING:
            if token_id in self._texts.eos_token_ids:
                return None
            return self._advance_in_reasoning(position.seen + text)
        if self._is_blank_before_answer(position, text):
            return position._replace(num_blanks=position.num_blanks + len(text))
        is_answer = position.is_answer and matcher.accept(token_id)
        if position.literals and token_id not in self._texts.eos_token_ids:
            seen = position.seen + text if position.seen else text.lstrip(BLANKS)
            for literal, section in position.literals:
                if seen.startswith(literal):
                    matcher.rollback(matcher.num_accepted)
                    return self._enter(section, seen[len(literal) :])
            left = tuple(each for each in position.literals if each[0].startswith(seen))
            if left and (seen or is_answer):
                return Position(Section.ANSWER, left, seen, is_answer=is_answer)
        return Position(Section.ANSWER) if is_answer else None

    def without_thoughts(self, position: Position) -> Position:
        left = tuple(each for each in position.literals if each[1] is not Section.REASONING)
        return position._replace(literals=left)

    def fill(self, position: Position, matcher: GrammarMatcher, row: MaskRow) -> None:
        if position.section is Section.FREE:
            row.fill(ALL_ALLOWED)
        elif position.section is Section.REASONING:
            row[:] = self._reasoning_row(position.seen)
        else:
            row.fill(0)
            if position.is_answer:
                matcher.fill_mask(row)
            if position.literals:
                row |= self._literal_row(position.literals, position.seen)
            if 0 <= position.num_blanks < MAX_WHITESPACE and not position.seen:
                row |= self._texts.blanks

    def _is_blank_before_answer(self, position: Position, text: bytes) -> bool:
        return 0 <= position.num_blanks < MAX_WHITESPACE and not position.seen and bool(text) and not text.strip(BLANKS)

    def _enter(self, section: Section, rest: bytes) -> Position | None:
        """The position after a literal, and `rest` after it in the same token."""
        if section is Section.REASONING:
            return self._advance_in_reasoning(rest)
        return Position(section) if section is Section.FREE or not rest else None

    def _advance_in_reasoning(self, text: bytes) -> Position | None:
        before, end, rest = text.partition(self._end)
        if any(literal in before for literal in self._inner):
            return None
        if not end:
            return Position(Section.REASONING, seen=text[max(len(text) - self._num_kept, 0) :])
        if not self._may_follow_end(rest):
            return None
        num_blanks = -1 if self._is_exact else len(rest)
        return Position(Section.ANSWER, self._after_reasoning, num_blanks=num_blanks, is_answer=not self._needs_literal)

    def _may_follow_end(self, rest: bytes) -> bool:
        """Whether `rest` may follow the end of the reasoning in the same token."""
        return not rest or (not self._is_exact and len(rest) <= MAX_WHITESPACE and not rest.strip(BLANKS))

    def _literal_row(self, literals: tuple[tuple[bytes, Section], ...], seen: bytes) -> MaskRow:
        key = literals, seen
        if key not in self._cached.literal:
            token_ids: list[int] = []
            for literal, section in literals:
                left = literal[len(seen) :]
                candidates = self._texts.continuing(left)
                if not seen:  # tokens of sentencepiece may begin with a blank
                    candidates += self._texts.continuing(b" " + left)
                for token_id in candidates:
                    text = self._texts.bytes_of(token_id)
                    text = text if seen else text.lstrip(BLANKS)
                    passes = text.startswith(left)
                    if text and (not passes or self._enter(section, text[len(left) :]) is not None):
                        token_ids.append(token_id)
            self._cached.literal[key] = self._texts.row(token_ids)
        return self._cached.literal[key]

    def _reasoning_row(self, seen: bytes) -> MaskRow:
        """All tokens but those that end the text, that go on after the end of the reasoning, and that must not be in it."""
        sought = (self._end, *self._inner)
        tails = (seen[i:] for i in range(len(seen)))
        begun = next((tail for tail in tails if any(text.startswith(tail) for text in sought)), b"")
        if begun not in self._cached.reasoning:
            forbidden = list(self._always_forbidden)
            for start in range(len(begun)):
                part = begun[start:]
                if self._end.startswith(part):
                    forbidden += [
                        token_id
                        for token_id, rest in self._texts.completing(self._end[len(part) :])
                        if not self._may_follow_end(rest)
                    ]
                for literal in self._inner:
                    if literal.startswith(part):
                        forbidden += [token_id for token_id, _ in self._texts.completing(literal[len(part) :])]
            self._cached.reasoning[begun] = self._texts.all_but_eos & ~self._texts.row(forbidden)
        return self._cached.reasoning[begun]
