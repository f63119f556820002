"""`kept_handler`: what a test does to a signal ends with the test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_handler(number: signal.Signals) -> Iterator[None]:
    """The signal has the handler of before when the context ends."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal(number, before)
