"""`Garbage`: collects garbage between steps. Python itself would collect during steps (5 ms)."""

import gc
import time

BUSY_SECONDS, IDLE_SECONDS = 60.0, 1.0  # the shortest time between two collections


class Garbage:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def collect(self, seconds: float) -> None:
        """Collect garbage if the last collection was `seconds` ago."""
        now = time.monotonic()
        if now - self._last >= seconds:
            gc.collect()
            self._last = now
