"""Whether other programs use the cores of a rank's compute threads, and what the rank does about it.

Linux counts how long a thread waits for a core (device/core_waiting.py). So a rank sees by itself whether it has company:
`CoreWatch` tells it to people, in the log and in the metrics, and `CoreBinding` acts on it.

If a rank has several compute threads, nobody waits for one that the operating system has stopped (kernels/cpu/team.h), so
nothing need be done. If it has only one, all other ranks wait for this thread in every sum. On a quiet machine the thread is
best on a core of its own: otherwise it often wakes on the core of the rank that has woken it. Beside another program it is best
unbound: then it continues on the core of a rank that sleeps.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from inflight.device.core_waiting import SHARED, waited_seconds

logger = logging.getLogger(__name__)

# For the binding: waiting is measured over windows of at least WINDOW_SECONDS. CALM_SECONDS after the last window with company,
# the thread is bound again.
WINDOW_SECONDS, CALM_SECONDS = 0.02, 0.15
# The same for people, who should not read a line for every page that a browser opens.
TOLD_WINDOW_SECONDS, TOLD_CALM_SECONDS = 0.5, 10.0


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
        """Whether company has come or gone since the last call. May be called at any time; reads a clock in most calls."""
        now = self._clock()
        if now - self._start < self._window:
            return False
        was_shared, waited = self.is_shared, self._waited_seconds()
        self.share = (waited - self._waited_before) / (now - self._start)
        self._start, self._waited_before = now, waited
        if self.share > SHARED:
            self.is_shared, self._last_company = True, now
        elif now - self._last_company >= self._calm:
            self.is_shared = False
        return self.is_shared != was_shared


class CoreBinding:
    """Binds a thread of this process to `core`, or lets it use all of `cores`. All calls come from one thread. The thread, its
    waiting and the clock are arguments as in `CoreWatch`."""

    def __init__(
        self,
        thread_id: int,
        core: int,
        cores: Sequence[int],
        waited_seconds: Callable[[int], float] = waited_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread_id, self._core, self._cores = thread_id, core, cores
        waited = partial(waited_seconds, thread_id)
        self._sharing = CoreSharing(waited, clock, window=WINDOW_SECONDS, calm=CALM_SECONDS)

    def follow(self) -> None:
        """Change the binding if company has come or gone."""
        if self._sharing.has_changed():
            is_free = self._sharing.is_shared
            os.sched_setaffinity(self._thread_id, self._cores if is_free else [self._core])
            logger.debug(
                "the compute thread of core %d %s", self._core, "may leave it" if is_free else "is bound again"
            )


class CoreWatch:
    """Logs when the compute threads of a rank begin or cease to share their cores with other programs. All calls come from one
    thread.

    Args:
        thread_ids: the rank's compute threads.
        binding: of the only thread, if it may leave its core.
        waited_seconds: how long a thread has waited for a core since it began.
        clock: seconds.
    """

    def __init__(
        self,
        thread_ids: Sequence[int],
        binding: CoreBinding | None = None,
        waited_seconds: Callable[[int], float] = waited_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.thread_ids, self._waited_seconds, self._binding = thread_ids, waited_seconds, binding
        self._sharing = CoreSharing(self._mean_waited, clock, window=TOLD_WINDOW_SECONDS, calm=TOLD_CALM_SECONDS)

    @property
    def shares_cores(self) -> bool:
        return self._sharing.is_shared

    def look(self) -> None:
        """Call this after each step."""
        if self._binding is not None:
            self._binding.follow()
        if self._sharing.has_changed():
            if self._sharing.is_shared:
                logger.info(
                    "other programs use the cores of the compute threads, which waited for a core for %.0f %% of the time: "
                    "steps take longer",
                    100 * self._sharing.share,
                )
            else:
                logger.info("the compute threads have their cores for themselves again")

    def _mean_waited(self) -> float:
        return statistics.fmean(map(self._waited_seconds, self.thread_ids))
