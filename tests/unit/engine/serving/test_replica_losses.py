"""Several replicas of the engine: what becomes of requests when one is lost, and what the server says of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.serving import replicas
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.engine_client import EngineState
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.errors import EngineDeadError, EngineRecoveringError
from inflight.interface.request import MAX_FAULTS, FinishReason
from inflight.interface.serving import AbortRequests, AddRequest, EngineOutputs, EngineReady
from inflight.interface.statistics import FaultStatus, SchedulerStats
from inflight.metrics.serving import ServingMetrics
from inflight.processes.streams import BlockingStream
from tests.support.refusals import refused
from tests.unit.engine.request.output_cases import request
from tests.unit.engine.serving.event_loop import run, until
from tests.unit.engine.serving.lone_front_end import answer, front_end_of, names, report, taken
from tests.unit.engine.serving.serving import endless, mock_args, mock_engine, read, reasons_of, submit, tokens_of


def test_requests_of_a_lost_replica_go_on_elsewhere_at_once() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        requests = [request(name, n=2) for name in "ab"]
        streams = [engine.submit_all([each], data_parallel_rank=0)[0] for each in requests]
        other = engine.submit_all([request("other")], data_parallel_rank=1)[0]
        answer(engine, requests[:1], [97, 98])
        taken(first), taken(second)
        first._lose("gone")
        moved = taken(second)
        assert [sequence.request_id.split(".", 2)[2] for sequence in moved] == ["0_a", "1_a", "0_b", "1_b"]
        assert [sequence.emitted_token_ids for sequence in moved] == [(97, 98), (97, 98), (), ()]
        assert [sequence.num_losses for sequence in moved] == [1] * 4
        assert (first.num_requests, second.num_requests) == (0, 3)
        assert first.admission.load == 0
        report(second, 0, step_id=7)  # it makes steps
        ready = await engine.check_ready()
        assert isinstance(ready[0], EngineRecoveringError) and ready[1] is None
        await engine.check_health()
        first._restore()
        assert taken(first) == []  # nothing comes back
        answer(engine, requests, [99], FinishReason.LENGTH)
        assert tokens_of(await read(streams[0])) == [97, 98, 99]
        assert reasons_of(await read(streams[1])) == ["length", "length"]
        other.abort()
        assert [type(message) for message in second.sent] == [AbortRequests] and first.sent == []
        assert [client.num_requests for client in (first, second)] == [0, 0]

    run(test)


def test_if_all_are_lost_requests_wait_for_the_first_that_is_there_again() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        engine.submit_all([request("a")], data_parallel_rank=0)
        assert names(first) == ["a"]
        first._lose("gone")
        assert names(second) == ["a"]
        second._lose("gone")
        engine.submit(request("late"))
        assert names(first) == names(second) == []
        first._restore()
        assert names(first) == ["a", "late"]
        second._restore()
        assert names(second) == []
        first._finish("gone")
        second._finish("gone")

    run(test)


def test_a_request_that_loses_engine_after_engine_stays_at_its_last_one() -> None:
    """There it runs alone. Otherwise it could end all replicas, again and again."""

    async def test() -> None:
        engine, clients = front_end_of(3)
        engine.submit_all([request("bad")], data_parallel_rank=0)
        at, visited = clients[0], []
        for _ in range(MAX_FAULTS):
            visited.append(at.index)
            at._lose("gone")
            moved = [client for client in clients if names(client) == ["bad"] and client.is_connected]
            if moved:
                [at] = moved
        assert sorted(visited) == [0, 1, 2] and not moved
        for client in clients:
            client.state = EngineState.CONNECTED  # all others are there again
        at.state = EngineState.LOST
        engine._replicas._resume()
        assert all(names(client) == [] for client in clients)
        at._restore()
        [sequence] = taken(at)
        assert sequence.num_losses == MAX_FAULTS
        for client in clients:
            client._finish("gone")

    run(test)


def test_a_request_waits_for_its_last_engine_no_longer_than_a_recovery_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica on another machine may be away for any time."""
    monkeypatch.setattr(replicas, "GRACE_SECONDS", 0.05)

    async def test() -> None:
        engine, clients = front_end_of(2)
        engine._replicas._limits = FaultToleranceConfig(engine_recovery_timeout_sec=0.05)
        engine.submit_all([request("bad")], data_parallel_rank=0)
        for number in range(MAX_FAULTS):
            at = clients[number % 2]
            assert names(at) == ["bad"]
            at._lose("gone")
            clients[1 - at.index].state = EngineState.CONNECTED
            if number < MAX_FAULTS - 1:
                engine._replicas._resume()
        other = clients[1 - at.index]
        engine._replicas._limits = FaultToleranceConfig()
        engine._replicas._resume()
        assert names(other) == []
        engine._replicas._limits = FaultToleranceConfig(engine_recovery_timeout_sec=0.05)
        await until(lambda: bool(other.sent))
        [sequence] = taken(other)
        assert sequence.num_losses == MAX_FAULTS, "it runs alone there"
        at._restore()
        assert names(at) == []
        for client in clients:
            client._finish("gone")

    run(test)


def test_the_engine_has_ended_when_the_last_replica_has() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        stream = engine.submit_all([request("a")], data_parallel_rank=0)[0]
        taken(first)
        ended: list[int] = []
        engine._requests.observers.engine_ended = ended.append  # type: ignore[method-assign]
        first._finish("too many recoveries")
        assert names(second) == ["a"] and ended == [0]
        await engine.check_health()
        assert engine.fault_status.state == "healthy"
        second._lose("gone")
        second._finish("gone for good")
        with pytest.raises(EngineDeadError, match="gone for good"):
            await read(stream)
        with pytest.raises(EngineDeadError, match="gone for good"):
            await engine.check_health()
        assert engine.fault_status.state == "failed"

    run(test)


def test_the_status_of_several_replicas_is_their_sum() -> None:
    one: Any = {"num_recoveries": {"engine_died": 2, "front_end_died": 3}, "epoch": 1, "num_resumed_requests": 4}
    two: Any = {"num_recoveries": {"rank_died": 1, "front_end_died": 3}, "spare_workers": 1, "last_cause": "rank 0"}
    both = FaultStatus.of_replicas([FaultStatus(**one), FaultStatus(**two, state="recovering")])
    assert both.num_recoveries == {"engine_died": 2, "rank_died": 1, "front_end_died": 3}
    assert (both.state, both.epoch, both.num_resumed_requests, both.spare_workers) == ("recovering", 1, 4, 1)
    assert FaultStatus.of_replicas([FaultStatus(**two)]) == FaultStatus(**two)


def test_the_last_cause_is_that_of_the_newest_recovery() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        for client, cause in ((second, "one"), (first, "two"), (second, "three"), (first, "four")):
            for _ in range(2):  # a status with the same cause is no news
                client._status = FaultStatus(last_cause=cause)
                client._listener.faults_changed(client, client.fault_status)
                assert engine.fault_status.last_cause == cause
        second._listener.faults_changed(second, second.fault_status)
        assert engine.fault_status.last_cause == "four"

    run(test)


@pytest.mark.parametrize("num_given_up", [1, 2])
def test_a_front_end_that_comes_when_a_replica_was_given_up_uses_the_others(num_given_up: int) -> None:
    async def test() -> None:
        arriving, streams = [EngineSockets(), EngineSockets()], []
        for index, each in enumerate(arriving):
            if index < num_given_up:
                each.fail(EngineDeadError("no more recoveries"))
                continue
            ours, theirs = socket.socketpair()
            each.put(ours)
            streams.append(BlockingStream(theirs))
            streams[-1].send(EngineReady(front_end=7, num_kv_cache_tokens=1000))
        if num_given_up == 2:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(AsyncLLM.attach(mock_args(data_parallel_size=2), *arriving), 300)
            return
        metrics = ServingMetrics("m", engines=range(2))
        attaching = AsyncLLM.attach(mock_args(data_parallel_size=2), *arriving, observers=[metrics])
        engine = await asyncio.wait_for(attaching, 300)
        shown = metrics.render("")[0].decode()
        for index in range(2):
            assert f'inflight:engine_up{{engine="{index}",model_name="m"}} {index}.0' in shown
        assert engine.num_kv_cache_tokens == [0, 1000] and engine._id_prefix == "7."
        assert engine.fault_status.state == "healthy"
        engine.submit(await engine.process("a", "x", endless(5)))
        message = await asyncio.to_thread(streams[0].receive, (AddRequest,))
        assert isinstance(message, AddRequest)
        await asyncio.wait_for(engine.close(), 300)
        for stream in streams:
            stream.close()

    run(test)


def test_front_ends_that_come_while_no_engine_is_connected_have_different_numbers() -> None:
    """The local replica was given up, and the other machine is away. When it is back, it has requests of both."""

    async def test() -> None:
        args = mock_args(data_parallel_size=2, data_parallel_size_local=1, data_parallel_address="127.0.0.1")
        prefixes = set()
        for _ in range(2):
            arriving = [EngineSockets(), EngineSockets()]
            for each in arriving:
                each.fail(EngineDeadError("given up, or away"))
            engine = await asyncio.wait_for(AsyncLLM.attach(args, *arriving), 300)
            states = [each.state for each in engine._replicas.engines]
            assert states == [EngineState.ENDED, EngineState.LOST]
            prefixes.add(engine._id_prefix)
            await asyncio.wait_for(engine.close(), 300)
        assert len(prefixes) == 2 and all(float(each) >= 2**31 for each in prefixes)

    run(test)


def test_a_replica_that_is_killed_costs_no_request() -> None:
    async def test() -> None:
        async with mock_engine({"data_parallel_size": 2, "num_threads": 1}) as engine:
            truth = tokens_of(await read(await submit(engine, "truth", "x", endless(400))))
            streams = [await submit(engine, str(i), "x", endless(400)) for i in range(8)]
            first = [await stream.__anext__() for stream in streams]
            num_lost = engine._replicas.engines[1].num_requests
            assert num_lost > 0  # half of them, if no report of an engine is late
            process = engine._keepers[1].process
            assert process is not None
            os.kill(process.process.pid, signal.SIGKILL)
            for begun, stream in zip(first, streams, strict=True):
                assert tokens_of([begun, *await read(stream)]) == truth
            await until(lambda: engine._replicas.engines[1].is_connected)
            await until(lambda: engine.fault_status.num_recoveries == {"engine_died": 1})
            await until(lambda: engine.fault_status.num_resumed_requests == num_lost)
            process = engine._keepers[1].process  # it has a cache of the same size
            assert process is not None and process.num_blocks == engine._keepers[1]._config.cache.num_blocks
            first_cached, second_cached = (each.cached for each in engine._replicas.engines)
            assert len(first_cached) > 0 and len(second_cached) == 0  # the new process has computed nothing
            request = await engine.process("last", "x", endless(400))
            assert tokens_of(await read(engine.submit_all([request], data_parallel_rank=1)[0])) == truth
            await until(lambda: len(second_cached) > 0)

    run(test)


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2, "data_parallel_start_rank": 3}, [3, 4]),
        ({"data_parallel_rank": 4}, [4]),
    ],
)
def test_a_server_may_have_some_of_the_replicas(fields: dict[str, Any], numbers: list[int]) -> None:
    """Other servers have the others, and a load balancer is before all."""

    async def test() -> None:
        args = mock_args(data_parallel_size=5, **fields)
        arriving, streams = [EngineSockets() for _ in numbers], []
        for each in arriving:
            ours, theirs = socket.socketpair()
            each.put(ours)
            streams.append(BlockingStream(theirs))
            streams[-1].send(EngineReady(front_end=0, num_kv_cache_tokens=1000))
        metrics = ServingMetrics("m", engines=args.replicas)
        engine = await asyncio.wait_for(AsyncLLM.attach(args, *arriving, observers=[metrics]), 300)
        with refused("data_parallel_rank", f"{numbers[0]} to 4"):
            engine.submit_all([await engine.process("a", "x", endless(5))], data_parallel_rank=0)
        engine.submit_all([await engine.process("a", "x", endless(5))], data_parallel_rank=4)
        assert isinstance(await asyncio.to_thread(streams[-1].receive, (AddRequest,)), AddRequest)
        assert [each.number for each in engine._replicas.engines] == numbers
        stats = SchedulerStats(step_id=0, num_running=1, num_waiting=0, num_waiting_tokens=0, kv_cache_usage=0.0)
        streams[-1].send(EngineOutputs(outputs=(), num_received=1, stats=stats))
        shown = 'inflight:num_requests_running{engine="4",model_name="m"} 1.0'
        await until(lambda: shown in metrics.render("")[0].decode())
        await asyncio.wait_for(engine.close(), 300)
        for stream in streams:
            stream.close()

    run(test)
