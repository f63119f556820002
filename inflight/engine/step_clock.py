"""`StepClock`: how long devices stood still between steps, and how much of the host's work a step hid, as the engine sees it.

For live metrics: two clock readings and a flag a step. `step_figures` says the same exactly, of each rank, from the timelines.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future

from inflight.interface.step import ModelRunnerOutput

MAX_GAPS = 1024  # kept until somebody takes them


class StepClock:
    """Driven by the engine's thread; a step may end in any other."""

    def __init__(self) -> None:
        self._newest: Future[ModelRunnerOutput] | None = None  # the step submitted last
        self._ended_ns = 0  # when the step that ended last did
        self._gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self._work_ns = self._hidden_ns = 0

    def submitted(self, future: Future[ModelRunnerOutput], *, after_idleness: bool) -> None:
        """A step has gone to the devices. With `after_idleness` they had nothing to do because there was no request."""
        if self._newest is not None and not after_idleness:
            now = time.perf_counter_ns()
            self._gaps.append(max(now - self._ended_ns, 0) / 1e9 if self._newest.done() else 0.0)
        self._newest = future
        future.add_done_callback(self._note_end)

    def worked(self, start_ns: int, end_ns: int) -> None:
        """The host planned, committed or filled masks. It is hidden if the newest step has not ended yet."""
        self._work_ns += end_ns - start_ns
        if self._newest is not None and not self._newest.done():
            self._hidden_ns += end_ns - start_ns

    def take(self) -> tuple[tuple[float, ...], float | None]:
        """The gaps in seconds, one a step, and the hidden share of the work, since the last call."""
        gaps, work, hidden = tuple(self._gaps), self._work_ns, self._hidden_ns
        self._gaps.clear()
        self._work_ns = self._hidden_ns = 0
        return gaps, hidden / work if work else None

    def _note_end(self, _: Future[ModelRunnerOutput]) -> None:
        self._ended_ns = time.perf_counter_ns()
