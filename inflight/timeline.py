"""A ring of the last step events: who did what in which step, from when to when.

Owns one preallocated ring per `Timeline`. Recording is two list stores; it is always on. Each part of the engine is
given the same `Timeline` and records its own phases: the engine `plan` and `commit`, the runner `prepare`, `forward` and
`sample`. Times are `time.perf_counter_ns()`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One phase of one step; `start_ns` and `end_ns` on the clock of `time.perf_counter_ns()`."""

    step_id: int
    phase: str
    start_ns: int
    end_ns: int

    @property
    def microseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3


class Timeline:
    """The ring. Writers may be several threads: an index is drawn atomically, a slot is written once."""

    def __init__(self, capacity: int = 4096) -> None:
        self._ring: list[Event | None] = [None] * capacity
        self._next = itertools.count()

    def record(self, step_id: int, phase: str, start_ns: int, end_ns: int) -> None:
        self._ring[next(self._next) % len(self._ring)] = Event(step_id, phase, start_ns, end_ns)

    @contextmanager
    def span(self, step_id: int, phase: str) -> Iterator[None]:
        """Record the time of the `with` body as one event, also when it raises."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(step_id, phase, start, time.perf_counter_ns())

    def events(self) -> list[Event]:
        """The events still in the ring, by start time."""
        return sorted((event for event in self._ring if event is not None), key=lambda event: event.start_ns)
