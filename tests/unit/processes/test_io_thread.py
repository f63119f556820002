"""`IoThread`: what runs there, in which order, and what remains when it has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.processes.io_thread import IoThread


@pytest.fixture
def io_thread() -> Iterator[IoThread]:
    io_thread = IoThread("test-io")
    io_thread.start()
    yield io_thread
    io_thread.stop()


def test_calls_run_in_the_thread_in_their_order(io_thread: IoThread) -> None:
    seen: list[object] = []
    for number in range(3):
        io_thread.call_soon(lambda number=number: seen.append(number))  # type: ignore[misc]
    name, is_current = io_thread.run(lambda: (threading.current_thread().name, io_thread.is_current))
    assert seen == [0, 1, 2]
    assert (name, is_current) == ("test-io", True)
    assert not io_thread.is_current and not io_thread.is_closed
    assert threading.current_thread().name != "test-io"


def test_values_and_errors_come_back(io_thread: IoThread) -> None:
    async def wait() -> int:
        await asyncio.sleep(0)
        return 7

    assert io_thread.run_coroutine(wait()) == 7
    with pytest.raises(ZeroDivisionError):
        io_thread.run(lambda: 1 // 0)
    assert io_thread.run(lambda: 8) == 8


def test_a_call_whose_caller_is_interrupted_is_cancelled(io_thread: IoThread, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    submit: Any = asyncio.run_coroutine_threadsafe

    def submit_and_interrupt(*arguments: object) -> object:
        future = submit(*arguments)

        def result() -> None:
            io_thread.loop.call_soon_threadsafe(begun.set)
            assert begun.wait(300)
            raise KeyboardInterrupt

        monkeypatch.setattr(future, "result", result)
        return future

    begun = threading.Event()
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        io_thread.run_coroutine(wait())
    assert cancelled.wait(300)


def test_an_end_comes_after_all_earlier_calls() -> None:
    io_thread = IoThread("test-io")
    seen: list[int] = []
    io_thread.start()
    for number in range(3):
        io_thread.call_soon(lambda number=number: seen.append(number))  # type: ignore[misc]
    io_thread.stop()
    assert seen == [0, 1, 2]
    assert io_thread.is_closed and io_thread.loop.is_closed()
    io_thread.stop()  # again
    io_thread.call_soon(lambda: seen.append(3))  # is dropped
    with pytest.raises(RuntimeError, match="the thread does not run"):
        io_thread.run(lambda: seen.append(4))
    assert seen == [0, 1, 2]


def test_a_thread_may_end_itself() -> None:
    io_thread = IoThread("test-io")
    io_thread.start()
    io_thread.run(io_thread.stop)
    io_thread.stop()
    assert io_thread.is_closed


def test_a_thread_that_was_never_started_leaves_no_loop() -> None:
    io_thread = IoThread("test-io")
    assert io_thread.is_closed
    with pytest.raises(RuntimeError, match="the thread does not run"):
        io_thread.run(lambda: None)
    io_thread.stop()
    assert io_thread.loop.is_closed()
