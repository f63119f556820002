"""Whether other programs use the cores of a rank's compute threads, and what the rank does about it.

Linux counts how long a thread waits for a core (device/core_waiting.py). If threads wait long, they *have company*: other
programs use their cores, or a quota of processor time stops them. `CoreWatch` reports this in the log and in the metrics.

- **One compute thread** (core_binding.py): all other ranks wait for this thread in every sum. On a quiet machine the thread is
  best on a core of its own: otherwise it often wakes on the core of the rank that has woken it. Beside another program it is
  best unbound: then it continues on the core of a rank that sleeps.
- **Several compute threads** (`LeaderPlace`): nobody waits for a thread that the operating system has stopped
  (kernels/cpu/team.h), so the threads stay bound. Only the leader must be brought back to its core.
"""

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence

from inflight.device.core_waiting import SHARED, core_of, idle_seconds, waited_seconds

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 0.02  # the shortest time over which bindings measure how long threads wait
IDLE = 0.4  # a core that was idle for this share of a window is free
# For the log and the metrics. Both times are longer, so a short load, such as a page that a browser opens, is not reported.
LOG_WINDOW_SECONDS, LOG_CALM_SECONDS = 0.5, 10.0


class CoreSharing:
    """Decides whether threads have company.

    Args:
        waited_seconds: how long a thread has waited for a core since it began; of several threads, their mean.
        clock: seconds.
        window, calm: in seconds. The threads have company from the first window with company on, until `calm` seconds have
            passed since the last one.
    """

    def __init__(
        self, waited_seconds: Callable[[], float], clock: Callable[[], float], *, window: float, calm: float
    ) -> None:
        self._waited_seconds, self._clock, self._window, self._calm = waited_seconds, clock, window, calm
        self._start, self._waited_before = clock(), waited_seconds()  # of the window
        self._last_company = 0.0
        self.is_shared, self.share = False, 0.0

    def has_changed(self) -> bool:
        """Whether company has come or gone since the last call. May be called at any time; most calls only read a clock."""
        now = self._clock()
        if now - self._start < self._window:
            return False
        was_shared = self.is_shared
        waited = self._waited_seconds()
        self.share = (waited - self._waited_before) / (now - self._start)
        self._start, self._waited_before = now, waited
        if self.share > SHARED:
            self.is_shared, self._last_company = True, now
        elif now - self._last_company >= self._calm:
            self.is_shared = False
        return self.is_shared != was_shared


class Binding:
    """Where compute threads run, and how many of them: changed from step to step."""

    def begin(self) -> None:
        """Call this before a step, while no other step computes."""

    def update(self) -> None:
        """Call this after each step."""


class LeaderPlace(Binding):
    """Brings the leader of several threads back to its core. The leader, which opens the tasks of a team, may use all cores of
    its rank; each other thread is bound to a core. If another program computes on the leader's core, Linux moves the leader to
    the core of another thread. When the program has ended, Linux leaves the leader there for some tenths of a second: while
    the leader runs, Linux does not move it, and the other thread, which waits, is bound. All calls come from one thread.

    Args:
        leader, core: the id of the leader, and its core.
        cores: the cores of the rank.
        core_of: where a thread runs.
        idle_seconds: how long a core has been idle.
    """

    def __init__(
        self,
        leader: int,
        core: int,
        cores: Sequence[int],
        core_of: Callable[[int], int] = core_of,
        idle_seconds: Callable[[int], float] = idle_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leader, self._core, self._cores = leader, core, cores
        self._core_of, self._idle_seconds, self._clock = core_of, idle_seconds, clock
        self._last_update, self._idle_before = 0.0, math.inf

    def update(self) -> None:
        """Move the leader to its core if it is on another one, and its core is idle."""
        now = self._clock()
        if now - self._last_update < WINDOW_SECONDS:
            return
        is_away = self._core_of(self._leader) != self._core
        idle = self._idle_seconds(self._core) if is_away else math.inf
        if is_away and idle - self._idle_before >= IDLE * (now - self._last_update):
            os.sched_setaffinity(self._leader, [self._core])
            os.sched_setaffinity(self._leader, self._cores)
        self._last_update, self._idle_before = now, idle


class CoreWatch:
    """Logs when the compute threads of a rank begin or cease to share their cores with other programs. All calls come from one
    thread.

    Args:
        thread_ids: the rank's compute threads.
        binding: changes what the threads may use; None if the threads are not bound, or if the user has named their cores.
        waited_seconds: how long a thread has waited for a core since it began.
        clock: seconds.
    """

    def __init__(
        self,
        thread_ids: Sequence[int],
        binding: Binding | None = None,
        waited_seconds: Callable[[int], float] = waited_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.thread_ids, self._waited_seconds, self._binding = thread_ids, waited_seconds, binding
        self._sharing = CoreSharing(self._mean_waited, clock, window=LOG_WINDOW_SECONDS, calm=LOG_CALM_SECONDS)

    @property
    def shares_cores(self) -> bool:
        return self._sharing.is_shared

    def begin(self) -> None:
        """Call this before a step, while no other step computes."""
        if self._binding is not None:
            self._binding.begin()

    def update(self) -> None:
        """Call this after each step."""
        if self._binding is not None:
            self._binding.update()
        if self._sharing.has_changed():
            if self._sharing.is_shared:
                logger.info(
                    "compute threads had to wait for their cores for %.0f %% of the time, because of other programs or a quota "
                    "of processor time: steps take longer",
                    100 * self._sharing.share,
                )
            else:
                logger.info("the compute threads have their cores for themselves again")

    def _mean_waited(self) -> float:
        return statistics.fmean(map(self._waited_seconds, self.thread_ids))
