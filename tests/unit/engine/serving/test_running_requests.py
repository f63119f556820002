"""`RunningRequests`: what becomes of requests and their readers when requests end, and when no engine is left."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.engine.serving.running_requests import RunningRequests
from inflight.errors import EngineClosedError, EngineDeadError, RequestTimeoutError
from inflight.interface.request import FinishReason
from tests.unit.engine.request.output_cases import DELTA, request
from tests.unit.engine.serving.event_loop import run
from tests.unit.engine.serving.lone_front_end import lone_front_end
from tests.unit.engine.serving.serving import read


def test_a_request_that_is_published_as_ended_is_forgotten_with_its_timer() -> None:
    async def test() -> None:
        requests, expired = RunningRequests(None), list[str]()
        queue = requests.add(request("a"), DELTA)
        requests.limit_time(queue.state.request, 1000.0, lambda request_id, _: expired.append(request_id))
        assert queue.timer is not None and len(requests) == 1
        requests.publish(requests.outputs.abort(["a"], FinishReason.ABORT))
        assert queue.timer.cancelled() and len(requests) == 0 and not expired
        await asyncio.wait_for(requests.drain.run(300.0), 300)  # the drain knows that it has ended

    run(test)


def test_a_request_that_takes_too_long_is_ended_at_its_engine_too() -> None:
    async def test() -> None:
        engine, client = lone_front_end()
        late = request("late")
        stream = engine.submit(late, timeout=0.0)
        with pytest.raises(RequestTimeoutError):
            await read(stream)
        assert len(client.sent) == 2 and len(engine._requests) == 0 and client.num_requests == 0

    run(test)


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_end_of_the_last_engine_is_a_death_only_if_nobody_has_closed_it(is_closed: bool) -> None:
    async def test() -> None:
        keepers: Any = [
            SimpleNamespace(state="it runs", has_ended=False),
            SimpleNamespace(state="killed by SIGKILL", has_ended=True),
        ]
        requests = RunningRequests(None, keepers=keepers)
        requests.check_open()
        if is_closed:
            requests.close()
        requests.record_death("the engine's process is gone", "lost")
        with pytest.raises(EngineClosedError if is_closed else EngineDeadError) as caught:
            requests.check_open()
        if not is_closed:
            assert isinstance(caught.value, EngineDeadError) and caught.value.summary == "lost"
            assert "gone: killed by SIGKILL" in str(caught.value) and "it runs" not in str(caught.value)

    run(test)


def test_what_the_engines_connections_know_does_not_keep_the_engine() -> None:
    """Not while a request with a timeout runs, either. Who reads a stream keeps the engine."""

    async def test() -> None:
        engine, client = lone_front_end()
        stream = engine.submit(request("a"), timeout=1000.0)
        alive = weakref.ref(engine)
        del engine
        gc.collect()
        assert alive() is not None
        del stream
        gc.collect()
        assert alive() is None and client.num_requests == 1

    run(test)
