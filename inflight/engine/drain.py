"""`Drain`: which requests are still taken while the engine is about to end, and when there is none left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from inflight.errors import EngineClosedError


class Drain:
    """Of one event loop.

        open --begin--> none begins, accepted ones are still submitted --end--> nothing is submitted

    Attributes:
        has_begun: no more requests are taken.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._has_ended = False
        self._num_accepted = 0
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def check_new(self) -> None:
        """
        Raises:
            EngineClosedError: no request may begin.
        """
        if self.has_begun:
            raise _takes_no_more()

    def check_submit(self) -> None:
        """
        Raises:
            EngineClosedError: no request may be submitted, whether it was accepted or not.
        """
        if self._has_ended or (self.has_begun and not self._num_accepted):
            raise _takes_no_more()

    @contextlib.contextmanager
    def accepted(self) -> Iterator[None]:
        """One more request is waited for."""
        self._num_accepted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_accepted -= 1
            self.note_running(self._num_running)

    def note_running(self, count: int) -> None:
        """So many requests have been submitted, and have not ended."""
        self._num_running = count
        if count or self._num_accepted:
            self._idle.clear()
        else:
            self._idle.set()

    async def run(self, timeout: float) -> None:
        """
        Raises:
            TimeoutError: after `timeout` seconds some are left.
        """
        self.has_begun = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        finally:
            self._has_ended = True


def _takes_no_more() -> EngineClosedError:
    return EngineClosedError("the engine takes no more requests: it is about to end")
