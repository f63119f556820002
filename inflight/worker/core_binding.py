"""`CoreBinding`: where the only compute thread of a rank runs. core_sharing.py says why."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from inflight.device.core_waiting import waited_seconds
from inflight.worker.core_sharing import WINDOW_SECONDS, Binding, CoreSharing

logger = logging.getLogger(__name__)

CALM_SECONDS = 0.15  # the thread is bound again so long after the last window with company


class CoreBinding(Binding):
    """Binds a thread of this process to `core`, or lets it use all of `cores`. All calls come from one thread.
    `waited_seconds` and `clock` are as in `CoreWatch`."""

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

    def update(self) -> None:
        """Change the binding if company has come or gone."""
        if self._sharing.has_changed():
            is_free = self._sharing.is_shared
            os.sched_setaffinity(self._thread_id, self._cores if is_free else [self._core])
            logger.debug(
                "the compute thread of core %d %s", self._core, "may leave it" if is_free else "is bound again"
            )
