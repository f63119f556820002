"""When each request is sent: seconds after the start, worked out before it, so that no answer can change it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from inflight.errors import ConfigError

RAMPS = ("linear", "exponential")


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """A gamma process: `burstiness` 1 is Poisson, less comes in clumps, more is more regular.

    Attributes:
        request_rate: requests per second; infinity sends all at once.
        burstiness: shape of the gamma distribution of the gaps, > 0.
        ramp_up: the rate rises from `ramp_up_start` to `ramp_up_end` from the first request to the last, instead of
            `request_rate`.
        burst_on, burst_off: seconds in turns; nothing arrives while it is off, and the rate is that of the time on.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: str | None = None
    ramp_up_start: float | None = None
    ramp_up_end: float | None = None
    burst_on: float | None = None
    burst_off: float | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate {self.request_rate} must be positive; inf sends all at once")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"--burstiness {self.burstiness} must be positive and finite")
        if (self.burst_on is None) != (self.burst_off is None):
            raise ConfigError("--burst-on and --burst-off go together")
        if self.burst_on is not None and self.burst_off is not None and not min(self.burst_on, self.burst_off) > 0:
            raise ConfigError("--burst-on and --burst-off must be positive")
        self._check_ramp_up()
        if self.ramp_up is None and self.burst_on is not None and math.isinf(self.request_rate):
            raise ConfigError("--burst-on needs a finite --request-rate: at an infinite one all is sent at once")

    def _check_ramp_up(self) -> None:
        rates = (self.ramp_up_start, self.ramp_up_end)
        if self.ramp_up is None:
            if rates != (None, None):
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
            return
        if self.ramp_up not in RAMPS:
            raise ConfigError(f"--ramp-up-strategy {self.ramp_up!r} must be one of {', '.join(RAMPS)}")
        if not math.isinf(self.request_rate):
            raise ConfigError("--ramp-up-strategy sets the rate: leave --request-rate out")
        if self.ramp_up_start is None or self.ramp_up_end is None or not 0 < self.ramp_up_start <= self.ramp_up_end:
            raise ConfigError("--ramp-up-strategy needs 0 < --ramp-up-start-rps <= --ramp-up-end-rps")

    def times(self, num_requests: int, rng: np.random.Generator) -> list[float]:
        """Ascending. Without a ramp the last is at num_requests / rate of time on, whatever was drawn."""
        if self.ramp_up is None and math.isinf(self.request_rate):
            return [0.0] * num_requests
        gaps = rng.gamma(self.burstiness, 1 / self.burstiness, num_requests)  # of mean 1
        if self.ramp_up is None:
            times = np.cumsum(gaps)
            times *= num_requests / self.request_rate / times[-1]
        else:
            times = np.cumsum(gaps / self._ramp(num_requests))
        if self.burst_on is not None and self.burst_off is not None:
            times += np.floor(times / self.burst_on) * self.burst_off
        return [float(time) for time in times]

    def _ramp(self, num_requests: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        assert self.ramp_up_start is not None and self.ramp_up_end is not None
        if self.ramp_up == "linear":
            return np.linspace(self.ramp_up_start, self.ramp_up_end, num_requests)
        return np.geomspace(self.ramp_up_start, self.ramp_up_end, num_requests)
