"""`Timeline`: records when each phase of a step began and ended, in a ring buffer that keeps the newest events.

Recording is always on, because it costs little. The engine core has a `Timeline`, and each rank has one. Their phases:

    engine   plan, mask (make the masks of grammars), wait (for the oldest step), commit, idle (no request to run)
    rank     prepare, receive (from other ranks), forward, sample, drain (copy the drawn tokens out), send

Times are `time.perf_counter_ns()`. On Linux this is one clock for all processes of a machine.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One phase of one step. `start_ns` and `end_ns` are times of `time.perf_counter_ns()`.

    The commit of a step may have `details`: how long the step was predicted to compute (`predicted_ms`), and how long it did
    (`measured_ms`).
    """

    step_id: int
    phase: str
    start_ns: int
    end_ns: int
    details: Mapping[str, float] | None = None

    @property
    def microseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3


class Span:
    """The context manager of `Timeline.span`, for one use. It is a class, because a generator makes twice as many calls."""

    def __init__(self, timeline: Timeline, step_id: int, phase: str) -> None:
        self._timeline, self._step_id, self._phase = timeline, step_id, phase

    def __enter__(self) -> None:
        self._thread, start = threading.get_ident(), time.perf_counter_ns()
        self._outer = self._timeline.spans.get(self._thread)
        self._timeline.spans[self._thread] = self._step_id, self._phase, start

    def __exit__(self, *_: object) -> None:
        self._timeline.record(*self._timeline.spans.pop(self._thread), time.perf_counter_ns())
        if self._outer is not None:
            self._timeline.spans[self._thread] = self._outer


class Timeline:
    """The ring buffer. Several threads may record events, because `deque.append` is atomic."""

    def __init__(self, capacity: int = 8192) -> None:
        self._ring = deque[tuple[Any, ...]](maxlen=capacity)  # the fields of `Event`s
        self.spans: dict[int, tuple[int, str, int]] = {}  # thread -> (step, phase, start) of its current span

    def record(
        self, step_id: int, phase: str, start_ns: int, end_ns: int, details: Mapping[str, float] | None = None
    ) -> None:
        self._ring.append((step_id, phase, start_ns, end_ns, details))

    def span(self, step_id: int, phase: str) -> Span:
        """Record the time of the `with` body as one event, even if the body raises."""
        return Span(self, step_id, phase)

    def under_way(self) -> list[str]:
        """Returns the spans that have not ended yet, oldest first, such as "forward of step 7 for 3.9 s". Any thread may call
        this method."""
        now = time.perf_counter_ns()
        spans = sorted(self.spans.copy().values(), key=lambda span: span[2])
        return [f"{phase} of step {step_id} for {(now - start) / 1e9:.1f} s" for step_id, phase, start in spans]

    def events(self, since_ns: int = 0) -> list[Event]:
        """Returns the events that are still in the ring buffer and ended after `since_ns`, by start time."""
        events = [event for event in itertools.starmap(Event, self._ring.copy()) if event.end_ns > since_ns]
        return sorted(events, key=lambda event: event.start_ns)
