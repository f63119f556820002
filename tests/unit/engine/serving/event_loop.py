"""Running a test on an event loop, and waiting for something on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """The engine's next report may be 50 ms away."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(500):
            await test()

    asyncio.run(limited())
