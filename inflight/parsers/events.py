"""What a parser emits, in order: content, reasoning, and tool calls whose arguments come piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the message's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks; it comes before all content and calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; calls have the indices 0, 1, ... in their order, and one is never taken back."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of the JSON text of a call's arguments: of the call that began last."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | ToolArgumentsDelta
Event = Delta | ToolCallStart


def join_deltas(events: Iterable[Event]) -> list[Event]:
    """The same events, neighbouring deltas of one kind (and call) made one."""
    joined: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        first, *others = group
        text = "".join(event.text for event in (first, *others) if isinstance(event, Delta))
        joined.append(replace(first, text=text) if isinstance(first, Delta) else first)
    return joined
