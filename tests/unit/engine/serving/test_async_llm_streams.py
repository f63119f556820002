"""`AsyncLLM` without an engine: what becomes of streams, timers and the queue when outputs, ends and deaths come together."""

from __future__ import annotations

import asyncio
import time

import pytest

from inflight.engine.request.request_state import RequestOutputKind
from inflight.errors import EngineDeadError, RequestTimeoutError
from inflight.interface.request import FinishReason
from tests.unit.engine.request.output_cases import request
from tests.unit.engine.serving.event_loop import run
from tests.unit.engine.serving.lone_front_end import answer, lone_front_end
from tests.unit.engine.serving.serving import read, reasons_of, text_of, tokens_of


def test_what_has_arrived_is_delivered_when_the_engine_dies() -> None:
    """2,000 complete answers come in one piece, of which the event loop takes in a few at a time."""

    async def test() -> None:
        engine, _ = lone_front_end(max_num_seqs=4096)
        requests = [request(str(i)) for i in range(2000)]
        streams = engine.submit_all(requests[:500], kind=RequestOutputKind.FINAL_ONLY)
        for part in range(500, 2000, 500):
            streams += engine.submit_all(requests[part : part + 500])
        unfinished = engine.submit(request("unfinished"))
        answer(engine, requests, [97, 98], FinishReason.LENGTH)
        engine._replicas.engines[0]._finish("the engine is gone")
        for stream in streams:
            outputs = await read(stream)
            assert (text_of(outputs), reasons_of(outputs)) == ("ab", ["length"])
        with pytest.raises(EngineDeadError, match="the engine is gone"):
            await read(unfinished)
        assert len(engine._requests) == 0

    run(test)


def test_a_stream_that_is_cut_gives_its_tokens_before_the_error() -> None:
    async def test() -> None:
        engine, _ = lone_front_end()
        requests = [request("dies"), request("late")]
        dies = engine.submit(requests[0])
        late = engine.submit(requests[1], timeout=0.0)
        dies_not_read = engine.submit(request("whole"), kind=RequestOutputKind.FINAL_ONLY)
        answer(engine, requests, [97])
        assert text_of([await anext(dies)]) == "a"
        answer(engine, requests[:1], [98])
        await asyncio.sleep(0.01)
        engine._replicas.engines[0]._finish("the engine is gone")
        assert tokens_of([await anext(dies)]) == [98]
        with pytest.raises(EngineDeadError):
            await anext(dies)
        with pytest.raises(EngineDeadError):
            await anext(dies_not_read)
        assert tokens_of([await anext(late)]) == [97]
        with pytest.raises(RequestTimeoutError):
            await anext(late)

    run(test)


def test_the_timer_of_an_ended_request_is_cancelled() -> None:
    """Else it would end a later request with the same id."""

    async def test() -> None:
        engine, _ = lone_front_end()
        first = request("a")
        for ends_by in ("engine", "abort"):
            stream = engine.submit(first, timeout=0.05)
            if ends_by == "engine":
                answer(engine, [first], [97], FinishReason.LENGTH)
            else:
                stream.abort()
            await read(stream)
        again = engine.submit(first)
        await asyncio.sleep(0.1)
        answer(engine, [first], [98], FinishReason.LENGTH)
        assert tokens_of(await read(again)) == [98]

    run(test)


def test_a_drain_ends_with_the_last_request() -> None:
    """Not only when its time is over."""

    async def test() -> None:
        engine, _ = lone_front_end()
        running = request("a")
        stream = engine.submit(running)
        drained = asyncio.create_task(engine.drain(200.0))
        await asyncio.sleep(0)
        start = time.monotonic()
        answer(engine, [running], [97], FinishReason.LENGTH)
        await drained
        assert time.monotonic() - start < 60
        assert reasons_of(await read(stream)) == ["length"]

    run(test)
