"""`wait_until`: waits for something that other threads or processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

MOST_SECONDS = 300.0  # so long that a slow machine makes no test fail
T = TypeVar("T")


def wait_until(find: Callable[[], T], seen: Callable[[], object] = lambda: "") -> T:
    """Call `find` again and again. Returns the first result that is true. `seen`: what the error says if there is none."""
    end = time.monotonic() + MOST_SECONDS
    while not (found := find()):
        assert time.monotonic() < end, f"it did not happen: {seen()}"
        time.sleep(0.005)
    return found
