"""`EventWriter`: where tool and reasoning parsers put what they have read.

1. White space next to markup belongs to it: before the first call, between calls and behind the last, at both ends of the
   reasoning. It is held back until what follows it is known, and is content where nothing but content does.
2. Text that may or may not become a call is held (`hold`) until it is sure: then `accept` drops it, for it was markup, or
   `reject` makes it content. So no text is lost, and at most `MAX_HELD` characters of it wait, and a literal.
3. Of more than `max_tool_calls` calls the later ones are left out.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.parsers.events import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart, join_deltas

MAX_HELD = 2**16  # characters
_BLANKS = " \t\r\n"


class MalformedCallError(Exception):
    """What looked like a call is none. Caught in this package: the text held so far is content."""


class _Trimmed:
    """Text without the white space at its ends. A longer run than `MAX_HELD` of it, within the text or at its end, stays."""

    def __init__(self, *, keeps_start: bool) -> None:
        self._is_started = keeps_start
        self._held: list[str] = []
        self._num_held = 0

    def write(self, text: str) -> str:
        """What can be shown now."""
        if not self._is_started:
            text = text.lstrip(_BLANKS)
            self._is_started = bool(text)
        body = text.rstrip(_BLANKS)
        before = self.release() if body else ""
        blanks = text[len(body) :]
        if blanks:
            self._num_held += len(blanks)
            self._held.append(blanks)
        if self._num_held > MAX_HELD:  # more of the run is shown as it comes
            body, self._held = body + "".join(self._held), []
        return before + body

    def release(self) -> str:
        """The white space at the end of what was written, now a part of the text."""
        held = "".join(self._held)
        self.drop()
        return held

    def drop(self) -> None:
        """Leave it out."""
        self._held.clear()
        self._num_held = 0


class EventWriter:
    """
    Args:
        make_id: a new call's id.
        max_tool_calls: None for any number.

    Attributes:
        num_tool_calls: that began.
    """

    def __init__(self, make_id: Callable[[], str], max_tool_calls: int | None) -> None:
        self.num_tool_calls = 0
        self._make_id = make_id
        self._max_tool_calls = max_tool_calls
        self._events: list[Event] = []
        self._held: list[str] = []
        self._num_held = 0
        self._content = _Trimmed(keeps_start=True)
        self._reasoning = _Trimmed(keeps_start=False)
        self._is_behind_call = False  # nothing but white space has come since
        self._is_left_out = False  # the call that began last
        self._is_call_open = False  # a call has begun, and its closing markup has not come yet

    def take_events(self) -> list[Event]:
        events, self._events = join_deltas(self._events), []
        return events

    def begin_reasoning(self) -> None:
        """What was content so far was white space in front of it."""
        self._content.drop()

    def reasoning(self, text: str) -> None:
        self._emit(ReasoningDelta, self._reasoning.write(text))

    def end_reasoning(self) -> None:
        """Behind its marker: content begins."""
        self._reasoning.drop()
        self._content = _Trimmed(keeps_start=False)

    def content(self, text: str) -> None:
        shown = self._content.write(text)
        self._is_behind_call &= not shown
        self._emit(ContentDelta, shown)

    def plain_content(self, text: str) -> None:
        """Content of a text without calls: no white space waits."""
        self._emit(ContentDelta, self._content.write(text) + self._content.release())

    @property
    def room(self) -> int:
        """How many characters may be held yet; at least one.

        Raises:
            MalformedCallError: none.
        """
        if self._num_held >= MAX_HELD:
            raise MalformedCallError
        return MAX_HELD - self._num_held

    def hold(self, text: str) -> None:
        """Text that may be a call's markup."""
        if text:
            self._held.append(text)
            self._num_held += len(text)

    def accept(self) -> None:
        """The held text was markup: drop it."""
        self._held.clear()
        self._num_held = 0

    def end_call(self) -> None:
        """The held text was the closing markup of the current call: drop it."""
        self.accept()
        self._is_call_open = False

    def cut(self) -> None:
        """The text has ended within markup. The closing markup of an open call is dropped; other text is not markup, and stays
        held."""
        if self._is_call_open:
            self.accept()

    def reject(self) -> None:
        """The held text was not markup: it is content."""
        held = "".join(self._held)
        self.accept()
        self.content(held)

    def start_call(self, name: str) -> None:
        """What was held is the markup of this call."""
        self.accept()
        self._content.drop()
        self._content = _Trimmed(keeps_start=True)
        self._is_behind_call = self._is_call_open = True
        self._is_left_out = self._max_tool_calls is not None and self.num_tool_calls >= self._max_tool_calls
        if not self._is_left_out:
            self._events.append(ToolCallStart(self.num_tool_calls, self._make_id(), name))
            self.num_tool_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text and not self._is_left_out:
            self._events.append(ToolArgumentsDelta(self.num_tool_calls - 1, text))

    def finish(self) -> None:
        """The text ends here: nothing is left held."""
        self.reject()
        if not self._is_behind_call:
            self._emit(ContentDelta, self._content.release())

    def _emit(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        if text:
            self._events.append(kind(text))
