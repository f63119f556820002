"""`StepClock`: estimates while the engine runs how long devices are idle, and which share of the host's work is hidden.

The estimates are for metrics. The clock is read only twice in each step, and the end of a step is known only when its result
has arrived. step_figures.py computes exact figures.
"""

import time
from collections import deque
from concurrent.futures import Future

from inflight.interface.step import ModelRunnerOutput

MAX_GAPS = 1024  # a `StepClock` keeps at most this many idle times until its method `take` is called


class StepClock:
    """Estimates idle times while the engine runs. The engine's thread calls all methods. Steps may end in any thread."""

    def __init__(self) -> None:
        self._end_ns: list[int] | None = None  # when the step ended that was submitted last; empty while it runs
        self._gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self._work_ns = self._hidden_ns = 0

    def submitted(self, future: Future[ModelRunnerOutput], *, after_idleness: bool) -> None:
        """Record that a step was submitted. If `after_idleness`, the engine had no request before this step, so the time before
        the step does not count as idle time."""
        if self._end_ns is not None and not after_idleness:
            now = time.perf_counter_ns()
            self._gaps.append(max(now - self._end_ns[0], 0) / 1e9 if self._end_ns else 0.0)
        self._end_ns = end_ns = []
        future.add_done_callback(lambda _: end_ns.append(time.perf_counter_ns()))

    def worked(self, start_ns: int, end_ns: int) -> None:
        """Record work of the host: planning, commits, masks. It counts as hidden if the newest step has not ended yet."""
        self._work_ns += end_ns - start_ns
        if self._end_ns is not None and not self._end_ns:
            self._hidden_ns += end_ns - start_ns

    def take(self) -> tuple[tuple[float, ...], float | None]:
        """Returns the idle time in seconds before each step since the last call, and which share of the host's work was hidden.
        The share is None if there was no work."""
        gaps, work, hidden = tuple(self._gaps), self._work_ns, self._hidden_ns
        self._gaps.clear()
        self._work_ns = self._hidden_ns = 0
        return gaps, hidden / work if work else None
