"""`PreciseSleep`: sleep until a point in time, within some ten microseconds, and let other threads run meanwhile."""

from __future__ import annotations

import ctypes
import threading
import time

SPIN_SECONDS = 0.0001  # the end of a sleep: a sleeper wakes this much too late
_PR_SET_TIMERSLACK = 29


class PreciseSleep:
    """For several threads, each of which is made precise when it first sleeps."""

    def __init__(self) -> None:
        self._precise_threads = threading.local()

    def until(self, end: float) -> None:
        """`end`: of `time.perf_counter()`."""
        if not getattr(self._precise_threads, "is_this_one", False):
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds; 50,000 by default
            self._precise_threads.is_this_one = True
        rest = end - SPIN_SECONDS - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        while time.perf_counter() < end:
            time.sleep(0)  # lets other threads run, as a device does
