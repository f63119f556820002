"""`with_enough_time`: for tests in which one rank is too late for a time limit, and others must keep it."""

from __future__ import annotations

from collections.abc import Callable

from inflight.errors import StepTimeoutError


def with_enough_time(check: Callable[[float], None]) -> None:
    """Call `check` with a time limit in seconds. If it fails, try longer limits: a rank that works may need longer than a short
    one, if other programs use the cores. A defect makes it fail with each."""
    for seconds in (0.1, 1.0, 10.0):
        try:
            return check(seconds)
        except (AssertionError, TimeoutError, StepTimeoutError):
            pass
    return check(60.0)
