"""`FreeTextReader`: reads a text that no grammar constrains, to find its reasoning. `ThinkingBudget` then bounds the reasoning.

Every token is admitted, also an EOS in the reasoning. There is one exception: after `without_thoughts` no reasoning may begin.
Where reasoning may begin, the parser of the answer decides, and this reader follows it:

- In most families it may begin at the beginning of the text, and again behind text. There an opening tag counts unless it is a
  quotation (`Quoting`). A tag in the arguments of a call is text. So behind the beginning of a call the reader looks at no more
  tokens, and neither if the text begins as JSON does, because that may be a call, too.
- In a family that divides its text into messages, each message may be reasoning.
"""

import re
from concurrent.futures import Future

from inflight.interface.request import AnswerFrame
from inflight.structured_output.answer_frame_reader import (
    MAX_CHARACTER_BYTES,
    UNLIMITED,
    FrameReader,
    Position,
    Section,
)
from inflight.structured_output.backend import ALL_ALLOWED, CompiledGrammar, GrammarMatcher, MaskRow
from inflight.structured_output.quoting import Quoting
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_output.token_texts import BLANKS, TokenTexts

FREE_TEXT = GrammarSpec("free_text", "")
_JSON = (b"{", b"[")
_UNQUOTED = Quoting()


class FreeMatcher(GrammarMatcher):
    """Admits every text. The text does not end by itself: the scheduler ends it at an EOS, as it does without a grammar."""

    def __init__(self) -> None:
        super().__init__(0, frozenset())

    def is_accepting(self) -> bool:
        return True

    def error(self) -> str:
        return ""

    def _accept(self, token_id: int) -> bool:
        return True

    def _rollback(self, num_tokens: int) -> None: ...

    def _fill_mask(self, row: MaskRow) -> None:
        row.fill(ALL_ALLOWED)


def free_grammar() -> Future[CompiledGrammar]:
    """The compiled grammar of `FREE_TEXT`: there is nothing to compile."""
    compiled: Future[CompiledGrammar] = Future()
    compiled.set_result(CompiledGrammar(FreeMatcher, 0))
    return compiled


class FreeTextReader(FrameReader):
    """One for a frame and a vocabulary. In ANSWER, reasoning may still begin."""

    def __init__(self, frame: AnswerFrame, texts: TokenTexts) -> None:
        self._texts = texts
        self._begin, self._end = frame.begin.encode(), frame.end.encode()
        self._has_messages = bool(frame.next_message)
        # The first part of `begin` with which it is certain that no answer begins. If no reasoning may begin, it is refused:
        # further on, the model could not write an answer any more.
        self._certain = _distinct_part(self._begin, frame.answer.encode())
        self._containing = [token_id for token_id, _ in texts.containing(self._certain)] if self._begin else []
        self._num_kept = max(MAX_CHARACTER_BYTES, len(self._end), len(self._begin)) - 1
        self._waiting = Position(Section.FREE)
        if self._begin:
            self._waiting = Position(Section.ANSWER, ((self._begin, Section.REASONING),))
        # of no text; None if no reasoning may come behind text
        self._quoting = _UNQUOTED if self._begin and not self._has_messages else None
        self.start = Position(Section.REASONING, quoting=self._quoting) if frame.is_open else self._waiting
        self._calls = [call.encode() for call in frame.calls]
        self._sought = [self._begin, *self._calls] if self._begin else []
        self._first_bytes = re.compile(b"|".join(re.escape(each[:1]) for each in self._sought))
        self._rows: dict[bytes, MaskRow] = {}

    def advance(self, position: Position, token_id: int, matcher: GrammarMatcher) -> Position | None:
        if position.section is Section.FREE:
            return position
        text = position.seen + self._texts.bytes_of(token_id)
        if position.section is Section.REASONING:
            return self._advance_in_reasoning(text, position.quoting)
        if position.quoting is not None:
            return self._advance_behind_text(text, position.quoting)
        if not self._has_messages:
            text = text.lstrip(BLANKS)
            if not (self._begin.startswith(text) or text.startswith(self._begin)):
                return self._advance_behind_text(text, _UNQUOTED)
        if not position.may_think and text.count(self._certain) > position.seen.count(self._certain):
            return None
        _, begin, rest = text.partition(self._begin)
        if begin:
            return self._advance_in_reasoning(rest, self._quoting)
        return position._replace(seen=self._kept(text))

    def fill(self, position: Position, matcher: GrammarMatcher, row: MaskRow) -> None:
        if self.num_free(position):
            row.fill(ALL_ALLOWED)
            return
        if position.seen not in self._rows:
            self._rows[position.seen] = ~self._texts.row(self._refused(position, matcher))
        row[:] = self._rows[position.seen]

    def without_thoughts(self, position: Position) -> Position:
        if position.quoting is not None:
            return position
        return position._replace(may_think=False)

    def num_free(self, position: Position) -> int:
        if position.may_think or position.quoting is not None:
            return UNLIMITED
        return super().num_free(position)

    def _refused(self, position: Position, matcher: GrammarMatcher) -> list[int]:
        """The tokens with which reasoning would begin."""
        begun = [length for length in range(len(self._certain)) if position.seen.endswith(self._certain[:length])]
        candidates = {token_id for length in begun for token_id, _ in self._texts.completing(self._certain[length:])}
        candidates.update(self._containing)
        return [token_id for token_id in candidates if self.advance(position, token_id, matcher) is None]

    def _advance_in_reasoning(self, text: bytes, quoting: Quoting | None) -> Position:
        _, end, rest = text.partition(self._end)
        if not end:
            return Position(Section.REASONING, (), self._kept(text), quoting=quoting)
        if quoting is not None:
            return self._advance_behind_text(rest, quoting)
        if self._has_messages:
            return self._waiting._replace(seen=self._kept(rest))
        return Position(Section.FREE)

    def _advance_behind_text(self, text: bytes, quoting: Quoting) -> Position:
        """The position behind `text`, in which reasoning may begin. `quoting`: of what is before it."""
        if quoting == _UNQUOTED:  # there is no text before it, or only white space
            text = text.lstrip(BLANKS)
            if text.startswith(_JSON):
                return Position(Section.FREE)
        while first := self._first_bytes.search(text):
            rest = text[first.start() :]
            quoting = quoting.after(text[: first.start()])
            if rest.startswith(self._begin):
                rest = rest[len(self._begin) :]
                if not quoting.is_quoted:
                    return self._advance_in_reasoning(rest, quoting)
            elif any(rest.startswith(call) for call in self._calls):
                return Position(Section.FREE)
            elif any(each.startswith(rest) for each in self._sought):
                return Position(Section.ANSWER, self._waiting.literals, rest, quoting=quoting)
            else:
                quoting, rest = quoting.after(rest[:1]), rest[1:]
            text = rest
        return Position(Section.ANSWER, self._waiting.literals, quoting=quoting.after(text))

    def _kept(self, text: bytes) -> bytes:
        return text[max(len(text) - self._num_kept, 0) :]


def _distinct_part(begin: bytes, answer: bytes) -> bytes:
    """The shortest first part of `begin` that is no first part of `answer`. All of `begin` if there is no such header."""
    lengths = range(1, len(begin)) if answer else ()
    return next((begin[:length] for length in lengths if not answer.startswith(begin[:length])), begin)
