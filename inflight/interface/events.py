"""The events that a parser emits: pieces of content, of reasoning, and of tool calls with their arguments."""

from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the message's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning. It may come again behind content or calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Calls have the indices 0, 1, ... in their order. A call that has begun is never taken back."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of the JSON text of the arguments of the call that began last."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | ToolArgumentsDelta
Event = Delta | ToolCallStart


def join_deltas(events: list[Event]) -> list[Event]:
    """Returns the same events, but joins successive deltas of one kind. Deltas of different calls are not joined."""
    if len(events) < 2:  # as after most tokens
        return events
    joined: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        first, *others = group
        text = "".join(event.text for event in (first, *others) if isinstance(event, Delta))
        joined.append(replace(first, text=text) if isinstance(first, Delta) else first)
    return joined
