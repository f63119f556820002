"""`with_enough_time`: for tests in which one rank is too late for a time limit, and others must keep it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from inflight.errors import StepTimeoutError

logger = logging.getLogger(__name__)
LAST = 60.0


def with_enough_time(check: Callable[[float], None], first: float = 0.1) -> None:
    """Call `check` with a time limit in seconds (`first`). If it fails, try longer limits, and log why: a rank that works may
    need longer than a short one, if other programs use the cores. So only a defect that always shows makes the test fail."""
    for seconds in (first, 10 * first, 100 * first):
        if seconds >= LAST:
            break
        try:
            return check(seconds)
        except (AssertionError, OSError, StepTimeoutError) as error:  # TimeoutError is an OSError
            logger.warning("with a limit of %g s: %s; the next one is longer", seconds, error)
    return check(LAST)
