"""`CoreBinding`: keeps a rank's only compute thread on its core, and lets it go while another program uses that core.

If a rank has several compute threads, nobody waits for one that the operating system has stopped (kernels/cpu/team.h). If it
has only one, all other ranks wait for this thread in every sum. On a quiet machine the thread is best on a core of its own:
otherwise it often wakes on the core of the rank that has woken it. Beside another program it is best unbound: then it continues
on the core of a rank that sleeps.

Linux counts how long a thread was ready to run without getting a core. So a rank sees by itself whether it has company.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 0.02  # so long a share of waiting is measured, at least
SHARED = 0.1  # a thread that waited for a core for more than this share of its time has company
CALM_SECONDS = 0.15  # without company for so long, the thread is bound again


class CoreSharing:
    """Decides whether a thread has company. Pure: times are arguments, in seconds. `observe` may be called at any time."""

    def __init__(self) -> None:
        self.is_shared = False
        self._start: tuple[float, float] | None = None  # of the window: the time, and how long the thread had waited
        self._last_company = 0.0

    def observe(self, now: float, waited: float) -> bool:
        """`waited`: how long the thread has waited for a core since it began. Returns whether it has company."""
        if self._start is None:
            self._start = now, waited
        start, waited_before = self._start
        if now - start >= WINDOW_SECONDS:
            self._start = now, waited
            if waited - waited_before > SHARED * (now - start):
                self.is_shared, self._last_company = True, now
            elif now - self._last_company >= CALM_SECONDS:
                self.is_shared = False
        return self.is_shared


class CoreBinding:
    """Binds a thread of this process to `core`, or lets it use all of `cores`. All calls come from one thread.

    Args:
        waited_seconds: how long the thread has waited for a core since it began.
        clock: seconds.
    """

    def __init__(
        self,
        thread_id: int,
        core: int,
        cores: Sequence[int],
        waited_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread_id, self._core, self._cores = thread_id, core, cores
        self._waited_seconds, self._clock = waited_seconds, clock
        self._sharing = CoreSharing()

    def follow(self) -> None:
        """Change the binding if company has come or gone."""
        was_shared = self._sharing.is_shared
        if self._sharing.observe(self._clock(), self._waited_seconds()) == was_shared:
            return
        os.sched_setaffinity(self._thread_id, [self._core] if was_shared else self._cores)
        place = "is bound again" if was_shared else "shares it with another program, and may use other cores for now"
        logger.info("the compute thread of core %d %s", self._core, place)


def waited_seconds(thread_id: int) -> float:
    """How long a thread of this process was ready to run without getting a core; 0 if the kernel does not count it."""
    try:
        return int(Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
