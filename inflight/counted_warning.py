"""CountedWarning: warnings that strangers can cause, at most one line a second."""

import logging
import time

SECONDS = 1.0


class CountedWarning:
    """Logs a warning, unless it has logged one less than a second ago. The next line then says how many were left out.

    Used by one thread.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next = 0.0  # when it may log again
        self._num_left_out = 0

    def log(self, text: str, *arguments: object) -> None:
        now = time.monotonic()
        if now < self._next:
            self._num_left_out += 1
            return
        more = f" (and {self._num_left_out} more since the last such line)" if self._num_left_out else ""
        self._next = now + SECONDS
        self._num_left_out = 0
        self._logger.warning(f"{text}%s", *arguments, more)
