"""`Drain`: who may still come, and that the wait ends when the last one has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from inflight.engine.drain import Drain
from inflight.errors import EngineClosedError

LONG = 20.0  # seconds that no test may wait out


def run(test: Callable[[], Awaitable[None]]) -> None:
    start = time.monotonic()
    asyncio.run(test())  # type: ignore[arg-type]
    assert time.monotonic() - start < LONG / 2, "a drain waited for its time instead of its last request"


def test_with_nothing_to_wait_for_it_ends_at_once() -> None:
    async def test() -> None:
        drain = Drain()
        drain.check_new()
        drain.check_submit()
        await drain.run(LONG)
        assert drain.has_begun
        for check in (drain.check_new, drain.check_submit):
            with pytest.raises(EngineClosedError, match="takes no more requests"):
                check()

    run(test)


def test_it_ends_with_the_last_of_those_that_run() -> None:
    async def test() -> None:
        drain = Drain()
        drain.note_running(2)
        drained = asyncio.create_task(drain.run(LONG))
        await asyncio.sleep(0)
        drain.note_running(1)
        await asyncio.sleep(0.01)
        assert not drained.done()
        drain.note_running(0)
        await drained

    run(test)


def test_it_ends_with_what_was_accepted_and_never_submitted() -> None:
    async def test() -> None:
        drain = Drain()
        with drain.accepted():
            with drain.accepted():
                drained = asyncio.create_task(drain.run(LONG))
                await asyncio.sleep(0)
                drain.check_submit()  # accepted before: it may still come
                with pytest.raises(EngineClosedError):
                    drain.check_new()
            await asyncio.sleep(0.01)
            assert not drained.done()
        with pytest.raises(EngineClosedError):
            drain.check_submit()
        await drained

    run(test)


def test_what_is_accepted_counts_until_it_runs_and_then_until_it_ends() -> None:
    async def test() -> None:
        drain = Drain()
        with drain.accepted():
            drained = asyncio.create_task(drain.run(LONG))
            await asyncio.sleep(0)
            drain.note_running(1)
            drain.note_running(0)  # another one has ended meanwhile
            await asyncio.sleep(0.01)
            assert not drained.done()
            drain.note_running(1)
        await asyncio.sleep(0.01)
        assert not drained.done()
        drain.note_running(0)
        await drained

    run(test)


def test_when_its_time_is_over_nothing_is_submitted_any_more() -> None:
    async def test() -> None:
        drain = Drain()
        drain.note_running(1)
        with drain.accepted():
            with pytest.raises(TimeoutError):
                await drain.run(0.01)
            with pytest.raises(EngineClosedError):
                drain.check_submit()

    run(test)
