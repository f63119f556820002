"""`ShrinkBudget`: hypothesis makes a failing example smaller for so many seconds, not for five minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import reject


class ShrinkBudget:
    """Around the body of one property test. Once the time is over, only examples that have failed before are run, so that
    hypothesis can still show the smallest one it has found; it takes all others for invalid.

    Args:
        seconds: from the first failure.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._failed: set[str] = set()
        self._ends = float("inf")

    @contextmanager
    def example(self, *arguments: object) -> Iterator[None]:
        """`arguments`: what the test was given, each with a `repr` that tells it from all others."""
        text = repr(arguments)
        if time.monotonic() > self._ends and text not in self._failed:
            reject()
        try:
            yield
        except Exception:
            self._failed.add(text)
            self._ends = min(self._ends, time.monotonic() + self._seconds)
            raise
