"""`VirtualTimeLoop`: an event loop whose clock jumps to the next timer when the loop has nothing to do for a millisecond.

Work in other threads or processes does not stop this clock.
Timeouts that a test gives to the code under test then mean the same on a slow and on a busy machine, and nobody waits for them.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

MOMENT = 0.001  # real seconds that the operating system gets to bring bytes from one socket to another


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The clock starts at 0, and jumps to the next timer when no descriptor has become ready."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:  # there is no timer
            return super().select(None)
        events = super().select(min(timeout, MOMENT))
        if not events:
            self._loop.advance(timeout)
        return events
