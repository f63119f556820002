"""`OutputStream`: what its reader gets when outputs, an error, an abort and its own end come together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.engine.request.request_state import RequestState
from inflight.engine.serving.output_stream import OutputQueue, OutputStream
from inflight.errors import EngineDeadError
from tests.support.virtual_time import VirtualTimeLoop


class Made:
    """A stream, and the state from which it takes its outputs."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.num_aborts = 0
        self.state = SimpleNamespace(request="the request", finished=False, take_output=self._take)
        self.queue = OutputQueue(cast("RequestState", self.state))
        self.stream = OutputStream(self.queue, self._abort)

    def _take(self) -> Any:
        return self.outputs.pop(0) if self.outputs else None

    def _abort(self) -> None:
        self.num_aborts += 1

    def come(self, text: str, *, finished: bool = False) -> Any:
        output = SimpleNamespace(text=text, finished=finished)
        self.outputs.append(output)
        self.state.finished = finished
        self.queue.notify()
        return output

    def read(self) -> asyncio.Task[Any]:
        async def read() -> Any:
            return await anext(self.stream)

        return asyncio.create_task(read())


def run(test: Callable[[Made], Awaitable[None]]) -> None:
    async def main() -> None:
        made = Made()
        assert aiter(made.stream) is made.stream
        await test(made)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_outputs_and_the_end() -> None:
    async def test(made: Made) -> None:
        assert made.stream.request is made.state.request
        reading = made.read()
        await settle()
        made.queue.notify()  # of news that another output has taken already
        await settle()
        assert not reading.done()
        first = made.come("a")
        assert await reading is first
        reading = made.read()
        await settle()
        assert not reading.done()
        last = made.come("b", finished=True)
        assert await reading is last
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(made.stream)
        made.stream.abort()
        await made.stream.aclose()
        assert made.num_aborts == 0

    run(test)


def test_an_error_comes_after_what_was_not_read() -> None:
    async def test(made: Made) -> None:
        output = made.come("a")
        made.queue.fail(EngineDeadError("gone"))
        assert await anext(made.stream) is output
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await anext(made.stream)

    run(test)


@pytest.mark.parametrize("has_read", [False, True])
def test_an_error_wakes_its_reader(has_read: bool) -> None:
    """What was made without news does not come."""

    async def test(made: Made) -> None:
        if has_read:
            made.come("a")
            await anext(made.stream)
            made.outputs.append("made without news")
        reading = made.read()
        await settle()
        made.queue.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError, match="gone"):
            await reading

    run(test)


def test_an_error_after_the_last_output_is_not_told() -> None:
    async def test(made: Made) -> None:
        made.come("a", finished=True)
        await anext(made.stream)
        made.queue.fail(EngineDeadError("gone"))
        with pytest.raises(StopAsyncIteration):
            await anext(made.stream)

    run(test)


def test_a_closed_stream_yields_nothing_more() -> None:
    async def test(made: Made) -> None:
        async def read() -> None:
            with pytest.raises(StopAsyncIteration):
                await anext(made.stream)

        reading = asyncio.create_task(read())
        await settle()
        await made.stream.aclose()
        await reading
        assert made.num_aborts == 1
        made.come("late")
        made.queue.fail(EngineDeadError("gone"))
        await read()

    run(test)


def test_a_stream_that_is_closed_after_an_error_yields_only_the_error() -> None:
    async def test(made: Made) -> None:
        made.come("unread")
        made.queue.fail(EngineDeadError("gone"))
        await made.stream.aclose()
        with pytest.raises(EngineDeadError):
            await anext(made.stream)

    run(test)


def test_an_aborted_stream_yields_its_last_output() -> None:
    async def test(made: Made) -> None:
        made.stream.abort()
        assert made.num_aborts == 1
        last = made.come("the rest", finished=True)
        assert await anext(made.stream) is last
        with pytest.raises(StopAsyncIteration):
            await anext(made.stream)

    run(test)
