"""`EventWriter`: turns the text that a tool or reasoning parser has read into events.

Markup is the text around a call or around the reasoning, such as `<tool_call>`. It is not a part of any event.

1. White space next to markup is left out too: before the first call, between calls, after the last call, and at both ends of
   the reasoning. White space is held back until it is known whether markup follows. If none follows, it becomes content.
2. Text that may be markup of a call is held (`hold`) until this is certain. If the text was markup, `accept` drops it. If not,
   `reject` makes it content, so no text is lost. At most `MAX_BUFFERED` characters and one tag are held.
3. Calls after the first `max_tool_calls` calls are left out.
4. A lone surrogate in the arguments of a call becomes U+FFFD (surrogates.py).
"""

from collections.abc import Callable

from inflight.interface.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    join_deltas,
)
from inflight.parsers.answer_tags import AnswerTags
from inflight.parsers.surrogates import SurrogateFilter
from inflight.tokenizer.stop_strings import StopSearch

MAX_BUFFERED = 2**18  # characters: as many as the arguments of a call in a request may have
_BLANKS = " \t\r\n"


class MalformedCallError(Exception):
    """A text that looked like a call is not a call. Only this package catches the error. The held text becomes content."""


class _Trimmed:
    """Removes the white space at both ends of a text. With `keeps_start`, removes only the white space at the end.

    White space at the end is not removed if it is longer than `MAX_BUFFERED` characters.
    """

    def __init__(self, *, keeps_start: bool) -> None:
        self._is_started = keeps_start
        self._held: list[str] = []
        self._num_held = 0
        self._ends_blank = False

    def write(self, text: str) -> str:
        """Add text. Returns the text that can be shown now."""
        if not self._is_started:
            text = text.lstrip(_BLANKS)
            self._is_started = bool(text)
        body = text.rstrip(_BLANKS)
        before = self.release() if body else ""
        blanks = text[len(body) :]
        self._ends_blank = bool(blanks) if text else self._ends_blank
        if blanks:
            self._num_held += len(blanks)
            self._held.append(blanks)
        if self._num_held > MAX_BUFFERED:  # too much to hold: from now on this white space is shown at once
            body = body + "".join(self._held)
            self._held = []
        return before + body

    def release(self) -> str:
        """Returns the held white space. Call it when text follows, because then the white space is a part of the text."""
        held = "".join(self._held)
        self.drop()
        return held

    def drop(self) -> None:
        self._held.clear()
        self._num_held = 0

    def leave_gap(self) -> None:
        """Something is left out here. If there is white space before it, that behind it is removed."""
        if self._is_started:
            self._is_started = not self._ends_blank


class EventWriter:
    """
    Args:
        make_id: makes the id of a new call.
        max_tool_calls: the largest number of calls; None for no limit.
        keeps_blanks: whether white space between the reasoning and the content is content, not markup.

    Attributes:
        num_tool_calls: how many calls have begun that are not left out.
        num_started: how many calls have begun.
        is_reasoning: whether the text is inside the reasoning.
        drops_content: whether text that is no call is dropped. Set it if the text can only be the beginning of a call that a
            limit has cut.
        stop_search: searches for stop strings in the content. All text after a stop string is dropped.
        may_stop: whether a stop string may end in the text that is read now.
        answer_tags: leaves out the tags around the answer; None if the family has none.
        next_call_id: the id that the model has written for the next call; "" if none.
    """

    def __init__(self, make_id: Callable[[], str], max_tool_calls: int | None, *, keeps_blanks: bool = False) -> None:
        self.num_tool_calls = 0
        self.num_started = 0
        self.is_reasoning = False
        self.drops_content = False
        self.stop_search: StopSearch | None = None
        self.may_stop = True
        self.answer_tags: AnswerTags | None = None
        self.next_call_id = ""
        self._written_ids: set[str] = set()
        self._make_id = make_id
        self._max_tool_calls = max_tool_calls
        self._keeps_blanks = keeps_blanks
        self._events: list[Event] = []
        self._held: list[str] = []
        self._num_held = 0
        self._content = _Trimmed(keeps_start=True)
        self._reasoning = _Trimmed(keeps_start=False)
        self._is_behind_call = False  # only white space has come since the last call
        self._is_thought = False  # whether content is still reasoning, because the closing tag is missing
        self._is_left_out = False  # whether the current call is left out
        self._is_call_open = False  # a call has begun, and its closing markup has not come yet
        self._surrogates = SurrogateFilter()  # of the arguments of the current call

    def take_events(self) -> list[Event]:
        events = join_deltas(self._events)
        self._events = []
        return events

    def begin_reasoning(self) -> None:
        """Reasoning begins. The content before it was only white space, and is dropped."""
        self.is_reasoning = True
        self._content.drop()

    def reasoning(self, text: str) -> None:
        self._emit(ReasoningDelta, self._reasoning.write(text))

    def end_reasoning(self) -> None:
        """The closing tag of the reasoning has been read. Content begins."""
        self.is_reasoning = False
        self._reasoning.drop()
        self._content = _Trimmed(keeps_start=self._keeps_blanks)

    def later_reasoning(self, text: str) -> None:
        """Write reasoning that stands between two pieces of content or calls."""
        self._end_answer()
        self.reasoning("\n\n")  # between two thoughts; dropped before the first
        self.reasoning(text)
        self._reasoning.drop()
        if self._is_behind_call:
            self._content = _Trimmed(keeps_start=False)
        else:
            self._content.leave_gap()

    def stay_in_reasoning(self) -> None:
        """The closing tag is missing. The text up to the first call is reasoning."""
        self._is_thought = True

    def content(self, text: str) -> None:
        if self._is_thought:
            self.reasoning(text)
            return
        if self.drops_content:
            return
        shown = self._content.write(text if self.answer_tags is None else self.answer_tags.write(text))
        self._is_behind_call &= not shown
        self._emit(ContentDelta, shown)

    def plain_content(self, text: str) -> None:
        """Write content of a text in which no calls are looked for. No white space is held back."""
        text = text if self.answer_tags is None else self.answer_tags.write(text)
        self._emit(ContentDelta, self._content.write(text) + self._content.release())

    @property
    def room(self) -> int:
        """How many more characters may be held. It is at least one.

        Raises:
            MalformedCallError: no more characters may be held.
        """
        if self._num_held >= MAX_BUFFERED:
            raise MalformedCallError
        return MAX_BUFFERED - self._num_held

    def hold(self, text: str) -> None:
        """Hold text that may be the markup of a call."""
        if text:
            self._held.append(text)
            self._num_held += len(text)

    @property
    def num_held(self) -> int:
        return self._num_held

    def take_held(self, num_kept: int) -> str:
        """Take back the held text behind its first `num_kept` characters, and return it."""
        held = "".join(self._held)
        self._held = [held[:num_kept]]
        self._num_held = num_kept
        return held[num_kept:]

    def accept(self) -> None:
        """Drop the held text, because it was markup."""
        self._held.clear()
        self._num_held = 0

    def end_call(self) -> None:
        """Drop the held text, because it was the closing markup of the current call."""
        self.accept()
        self._end_arguments()
        self._is_call_open = False

    def cut(self) -> None:
        """The text has ended within what may be markup. If a call is open, the held text is part of its closing markup and is
        dropped. If no call is open, the held text is not markup and stays held."""
        if self._is_call_open:
            self.accept()

    def reject(self) -> None:
        """Make the held text content, because it was not markup."""
        held = "".join(self._held)
        self.accept()
        self.content(held)

    def start_call(self, name: str) -> None:
        """Start a call. The held text was its opening markup and is dropped."""
        self.accept()
        self._end_arguments()
        self._reasoning.drop()
        self.is_reasoning = self._is_thought = False
        self._end_answer()
        self._release_content()
        self._content.drop()
        self._content = _Trimmed(keeps_start=True)
        self._is_behind_call = self._is_call_open = True
        self.num_started += 1
        self._is_left_out = self._max_tool_calls is not None and self.num_tool_calls >= self._max_tool_calls
        if not self._is_left_out and not self._is_stopped:
            self._events.append(ToolCallStart(self.num_tool_calls, self._id(), name))
            self.num_tool_calls += 1

    def _id(self) -> str:
        """The id that the model has written; a new one if there is none, or if an earlier call has it."""
        call_id = self.next_call_id
        self.next_call_id = ""
        if not call_id or call_id in self._written_ids:
            return self._make_id()
        self._written_ids.add(call_id)
        return call_id

    def arguments(self, text: str) -> None:
        """Write more of the arguments of the current call."""
        self._write_arguments(self._surrogates.write(text))

    def _end_arguments(self) -> None:
        self._write_arguments(self._surrogates.finish())

    def _write_arguments(self, text: str) -> None:
        if text and not self._is_left_out and not self._is_stopped:
            self._events.append(ToolArgumentsDelta(self.num_tool_calls - 1, text))

    def finish(self) -> None:
        """The text has ended. Text that is still held becomes content."""
        self._end_arguments()
        self.reject()
        self._end_answer()
        if not self._is_behind_call:
            self._emit(ContentDelta, self._content.release())
        self._release_content()

    def _end_answer(self) -> None:
        """The content has ended, at least for now. So what is held back is a closing tag, or text."""
        if self.answer_tags is not None and (rest := self.answer_tags.release()):
            self._emit(ContentDelta, self._content.write(rest))

    @property
    def _is_stopped(self) -> bool:
        return self.stop_search is not None and self.stop_search.found is not None

    def _release_content(self) -> None:
        """The content has ended here. So the text that is held back is not the beginning of a stop string: write it."""
        if self.stop_search is not None and (held := self.stop_search.release()):
            self._events.append(ContentDelta(held))

    def _emit(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        if self.stop_search is not None and text:
            if kind is ContentDelta:
                text = self.stop_search.write(text, search=self.may_stop)
            elif self._is_stopped:
                return
        if text:
            self._events.append(kind(text))
