"""`StartUpClock`: how long each phase of the start took, counted from the start of the process, and logged as it ends."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)


class StartUpClock:
    """One caller at a time. Phases follow each other."""

    def __init__(self) -> None:
        self._end = 0.0  # of the last phase, in seconds since the process started
        self.phases: dict[str, float] = {}  # name -> seconds

    def mark(self, phase: str) -> None:
        """The phase has ended."""
        now = seconds_since_process_start()
        self.phases[phase] = now - self._end
        self._end = now
        logger.info("start-up: %s took %.2f s (%.2f s since the command)", phase, self.phases[phase], now)

    def summary(self) -> str:
        """ "3.21 s: listening 0.31, engine 2.90" """
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.phases.items())
        return f"{self._end:.2f} s: {parts}"


def seconds_since_process_start() -> float:
    """proc(5): field 22 of /proc/self/stat is the start in clock ticks since boot."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
