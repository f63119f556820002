"""`Breaker`: after several failures in a row it keeps operations from a tier for a while."""

import threading
import time
from collections.abc import Callable

MAX_FAILURES = 3  # in a row
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds


class Breaker:
    """Closed: operations run. Open: none runs. After the pause one operation may try (half open): success closes the breaker, a
    failure opens it for twice as long. `enter` gives each operation a ticket. If the breaker has opened since, the ticket is
    old, and the end of the operation does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._pause = FIRST_PAUSE
        self._retry_at: float | None = None  # None: closed, or a trial runs
        self._ticket = 0
        self._is_trying = False

    def enter(self) -> int | None:
        """Returns the ticket of an operation that may run, None if it may not. Each ticket must come back to `leave`."""
        with self._lock:
            if self._is_trying or (self._retry_at is not None and self._clock() < self._retry_at):
                return None
            if self._retry_at is not None:
                self._is_trying = True
                self._retry_at = None
                self._ticket += 1
            return self._ticket

    def leave(self, ticket: int, is_good: bool) -> bool:
        """Notes how an operation ended. Returns whether the closed breaker opens by it, or the half-open one closes."""
        with self._lock:
            if ticket != self._ticket:
                return False
            was_trying, self._is_trying = self._is_trying, False
            if is_good:
                self._num_failures = 0
                self._pause = FIRST_PAUSE
                return was_trying
            self._num_failures += 1
            if self._num_failures < MAX_FAILURES:
                return False
            self._retry_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._ticket += 1
            return not was_trying
