"""CountedWarning: warnings that strangers can cause, or that a lasting failure repeats: at most one line in some time."""

import logging
import time

SECONDS = 1.0


class CountedWarning:
    """Logs a warning, unless it has logged one less than `seconds` ago. The next line then says how many were left out.

    Used by one thread.
    """

    def __init__(self, logger: logging.Logger, seconds: float = SECONDS, level: int = logging.WARNING) -> None:
        self._logger = logger
        self._seconds = seconds
        self._level = level
        self._next = 0.0  # when it may log again
        self._num_left_out = 0

    def log(self, text: str, *arguments: object) -> None:
        now = time.monotonic()
        if now < self._next:
            self._num_left_out += 1
            return
        more = f" (and {self._num_left_out} more since the last such line)" if self._num_left_out else ""
        self._next = now + self._seconds
        self._num_left_out = 0
        self._logger.log(self._level, f"{text}%s", *arguments, more)
