"""`RecoveryLimits`: how many lost processes are replaced in an hour."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.config.fault_tolerance import FaultToleranceConfig

HOUR = 3600.0


@dataclass
class RecoveryLimits:
    """Counts the recoveries that replaced a process. Lost ranks, lost engine cores and lost front ends are counted separately.
    A recovery counts once, however many processes it starts. Failed steps alone are not counted. They cannot go on for ever,
    because the scheduler ends a request that fails again and again.

    Attributes:
        times: when the recoveries were, as times of `time.monotonic()`, the same clock in all processes of a machine.
    """

    config: FaultToleranceConfig
    times: deque[float] = field(default_factory=deque)

    def record(self) -> None:
        self.times.append(time.monotonic())

    def add_earlier(self, times: Sequence[float]) -> None:
        """Count recoveries in an earlier process, too. So a request that ends ranks and engine cores in turn is limited."""
        self.times.extendleft(reversed(times))

    def problem(self) -> str:
        """Returns why no further recovery is allowed, or "" if it is allowed."""
        while self.times and self.times[0] < time.monotonic() - HOUR:
            self.times.popleft()
        if len(self.times) < self.config.max_recoveries:
            return ""
        return f"{self.config.max_recoveries} recoveries within one hour are allowed (max_recoveries), and they have been made"
