"""Several replicas of the engine: which one gets a request, and what becomes of requests when one is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.request.input_processor import ProcessedRequest
from inflight.engine.serving import cached_index, replicas
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.cached_index import CachedIndex
from inflight.engine.serving.engine_client import EngineState
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.engine.serving.output_lengths import FIRST_LENGTH as W
from inflight.errors import EngineDeadError, EngineRecoveringError, InvalidRequestError, OverloadedError
from inflight.interface.request import MAX_FAULTS, EngineCoreRequest, FinishReason
from inflight.interface.serving import AbortRequests, AddRequest, CachedBlocks, EngineOutputs, EngineReady
from inflight.interface.statistics import FaultStatus, SchedulerStats
from inflight.kv_cache.block_hash import BlockHasher
from inflight.metrics.serving import ServingMetrics
from inflight.processes.streams import BlockingStream
from tests.unit.engine.request.output_cases import request
from tests.unit.engine.serving.event_loop import run, until
from tests.unit.engine.serving.lone_front_end import RecordingClient, answer, front_end_of
from tests.unit.engine.serving.serving import endless, mock_args, mock_engine, read, reasons_of, submit, tokens_of

DRAWN = 99  # the most tokens of a sequence that `request` makes
HASHER = BlockHasher("model", 16)


def taken(client: RecordingClient) -> list[EngineCoreRequest]:
    """Returns the sequences that were sent to this replica since the last call."""
    found = [sequence for message in client.sent if isinstance(message, AddRequest) for sequence in message.sequences]
    client.sent.clear()
    return found


def names(client: RecordingClient) -> list[str]:
    return [sequence.request_id.split(".", 2)[2] for sequence in taken(client)]


def report(client: RecordingClient, num_received: int, **state: int) -> None:
    fields = {"step_id": 0, "num_running": 0, "num_waiting": 0, "num_waiting_tokens": 0, **state}
    stats = SchedulerStats(kv_cache_usage=0.0, **fields)
    client.take_outputs(EngineOutputs(outputs=(), num_received=num_received, stats=stats))


# -- which replica ---------------------------------------------------------------------------------------------------


def test_a_burst_is_divided_by_the_tokens_of_its_prompts() -> None:
    async def test() -> None:
        engine, clients = front_end_of(4, max_num_seqs=256)
        draws = random.Random(1)
        for i in range(512):
            engine.submit(request(str(i), [97] * round(10 * 40 ** draws.random())))
        loads = [client.admission.load for client in clients]
        assert max(loads) < 1.02 * sum(loads) / 4
        for client in clients:
            client._finish("gone")

    run(test)


def test_the_newest_report_and_what_was_sent_after_it_are_counted() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        report(first, 0, num_running=3, num_running_tokens=203)
        report(second, 0, num_running=30, num_running_tokens=30, num_waiting=2, num_waiting_tokens=100)
        assert (first.admission.load, second.admission.load) == (203 + 3 * W, 130 + 32 * W)
        report(second, 0, num_running=2, num_running_tokens=3, num_waiting=1, num_waiting_tokens=100)
        assert (first.admission.load, second.admission.load) == (203 + 3 * W, 103 + 3 * W)
        engine.submit(request("a", [97] * 80))
        assert (names(first), names(second)) == ([], ["a"])
        assert second.admission.load == 183 + 3 * W + DRAWN
        engine.submit(request("b", [97] * 50, n=3))  # its sequences stay together
        assert (names(first), names(second)) == (["0_b", "1_b", "2_b"], [])
        report(second, 1, num_running=1, num_running_tokens=1)
        assert (first.admission.load, second.admission.load) == (253 + 3 * W + 3 * DRAWN, 1 + W)
        report(second, 0, num_running=1, num_running_tokens=1)
        assert [client.num_requests for client in (first, second)] == [1, 1]
        first._finish("gone")
        second._finish("gone")

    run(test)


def test_requests_are_refused_only_if_every_queue_is_full() -> None:
    async def test() -> None:
        engine, clients = front_end_of(2, 1, QueueLimits(max_queued_requests=1))
        for i in range(4):  # one runs and one waits at each
            engine.check_admission()
            engine.submit(request(str(i)))
        assert sorted(len(taken(client)) for client in clients) == [2, 2]
        for refuse in (engine.check_admission, lambda: engine.submit(request("more"))):
            with pytest.raises(OverloadedError, match="at most 1 may wait"):
                refuse()
        with pytest.raises(InvalidRequestError, match=r"3 sequences .* at most 2 are allowed"):
            engine.submit(request("wide", n=3))
        with pytest.raises(InvalidRequestError, match=r"for each of 2 replicas: 3 sequences .* at most 2 are allowed"):
            engine.check_admission(5)
        report(clients[1], 2)
        with pytest.raises(OverloadedError):
            engine.submit_all([request(str(i)) for i in range(10, 13)])  # there is room for two
        assert len(engine._requests) == 4  # none was started
        engine.submit_all([request(str(i)) for i in range(10, 12)])
        assert (names(clients[0]), names(clients[1])) == ([], ["10", "11"])
        for client in clients:
            client._finish("gone")

    run(test)


def test_prompts_of_one_call_are_divided() -> None:
    async def test() -> None:
        engine, clients = front_end_of(2)
        engine.submit_all([request(str(i), [97] * (10 + i)) for i in range(20)])
        assert [len(taken(client)) for client in clients] == [10, 10]
        for client in clients:
            client._finish("gone")

    run(test)


def test_a_client_may_choose_the_replica() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        for name in "abc":
            engine.submit_all([request(name)], data_parallel_rank=1)
        assert (names(first), names(second)) == ([], ["a", "b", "c"])
        for wrong in (2, -1):
            with pytest.raises(InvalidRequestError, match="names no replica; this server has the replicas 0 to 1"):
                engine.submit_all([request("d")], data_parallel_rank=wrong)
        second._lose("gone")
        assert names(first) == ["a", "b", "c"]
        engine.submit_all([request("d")], data_parallel_rank=1)
        assert names(first) == ["d"]
        first._finish("gone")
        second._finish("gone")

    run(test)


def test_a_replica_whose_ranks_recover_gets_nothing_new() -> None:
    """Its engine's process lives, and its own requests wait there."""

    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        stay = engine.submit_all([request("stay")], data_parallel_rank=0)
        first.take_faults(FaultStatus(state="recovering"))
        for name in "abc":
            engine.submit_all([request(name)], data_parallel_rank=0)
        assert (names(first), names(second)) == (["stay"], ["a", "b", "c"])
        second.take_faults(FaultStatus(state="recovering"))
        engine.submit_all([request("d")], data_parallel_rank=0)
        assert names(first) == ["d"], "if all recover, requests wait at the one that was asked for"
        first.take_faults(FaultStatus())
        engine.submit_all([request("e")], data_parallel_rank=1)
        assert names(first) == ["e"] and len(stay) == 1
        first._finish("gone")
        second._finish("gone")

    run(test)


def prompt(length: int, salt: str = "", first: int = 97) -> ProcessedRequest:
    """A request that knows the names of its blocks."""
    made = request(f"{first}-{length}-{salt}", [first] * length)
    return replace(made, block_names=HASHER.names(salt, made.prompt_array))


def cache(client: RecordingClient, made: ProcessedRequest, num_blocks: int) -> None:
    stored = client.cached.entries(made.block_names)[:num_blocks]
    client.cached.apply(CachedBlocks(stored=b"".join(stored), removed=b""))


def test_cached_tokens_are_no_work() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        cache(second, prompt(800), 40)
        assert len(prompt(161).block_names) == 32 * 10 and len(prompt(160).block_names) == 32 * 9
        for salt, length, expected in [("", 161, second), ("a", 161, first), ("b", 161, second)]:
            report(first, 0)
            report(second, 0, num_running=1 if salt == "a" else 0)  # without a hit, the idle one
            if salt == "b":
                report(first, 0, num_running=1)
            made = prompt(length, salt)
            engine.submit(made)
            assert engine._requests.outputs._requests[made.request_id].engine == expected.index
        report(first, 99)
        report(second, 99)
        engine.submit(prompt(641))
        assert second.admission.load == 1 + DRAWN
        # the hit is worth 640 tokens to be computed, as much as 960: more than three sequences, less than four
        report(second, 99, num_running=3, num_running_tokens=3)
        engine.submit(prompt(642))
        report(first, 99)
        report(second, 99, num_running=4, num_running_tokens=4)
        engine.submit(prompt(643))
        report(first, 99)
        report(second, 99)
        second._lose("gone")  # its next process has no cache
        second._restore()
        assert len(second.cached) == 0
        at = [engine._requests.outputs._requests[f"97-{length}-"].engine for length in (641, 642, 643)]
        assert at == [0, 0, 0] and first.num_requests == 6  # those of the second went to the first when it was lost
        first._finish("gone")
        second._finish("gone")

    run(test)


# shared tokens that one replica has cached, own tokens of each prompt, prompts, tokens that each of them draws
GROUPS = [
    (600, 1, 16, 300),
    (1500, 20, 32, 100),
    (1500, 20, 16, 100),
    (400, 20, 24, 100),
    (4000, 1, 200, 64),
    (64, 1, 9, 9),
]


@pytest.mark.parametrize("in_one_call", [True, False])
@pytest.mark.parametrize(("shared", "own", "count", "drawn"), GROUPS)
def test_a_group_is_spread_when_its_replica_is_full(
    shared: int, own: int, count: int, drawn: int, in_one_call: bool
) -> None:
    """The busier replica has no more to do than if the group had been divided without a look at the caches."""

    def member(i: int) -> ProcessedRequest:
        made = prompt(shared + own)
        tokens = [*made.prompt_token_ids[:shared], *[i % 250] * own]
        prompt_array = np.array(tokens, np.int32)
        made = request(f"{i}", tokens, max_tokens=drawn, ignore_eos=True)
        return replace(
            made,
            sequences=tuple(
                replace(each, sampling=replace(each.sampling, max_tokens=drawn)) for each in made.sequences
            ),
            block_names=HASHER.names("", prompt_array),
        )

    async def test() -> None:
        engine, clients = front_end_of(2, max_num_seqs=256)
        members = [member(i) for i in range(count)]
        cache(clients[0], members[0], shared // 16)
        if in_one_call:
            engine.submit_all(members)
        else:
            for each in members:
                engine.submit(each)
        at = [sum(state.engine == index for state in engine._requests.outputs.unfinished()) for index in (0, 1)]
        busier = max(at[0] * (own + drawn), at[1] * (own + drawn) + (shared if at[1] else 0))
        divided = count / 2 * (own + drawn) + shared
        assert busier <= divided + own + drawn and sum(at) == count
        for client in clients:
            client._finish("gone")

    run(test)


def test_a_prompt_that_was_sent_counts_as_cached_until_its_request_ends() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        leader, block = prompt(161), 16
        stream = engine.submit_all([leader], data_parallel_rank=1)[0]
        follower = prompt(163)
        assert second.cached.num_cached(follower.block_names) == 10 and first.cached.num_cached(leader.block_names) == 0
        assert len(second.cached) == 0, "nothing was reported yet"
        work = [engine._replicas.router.work(each, follower) for each in (first, second)]
        assert work[0] - work[1] == 10 * block
        other = engine.submit_all([follower], data_parallel_rank=1)[0]
        stream.abort()
        assert second.cached.num_cached(leader.block_names) == 10, "another request has it, too"
        other.abort()
        assert second.cached.num_cached(leader.block_names) == 0
        lost = engine.submit_all([prompt(165)], data_parallel_rank=1)[0]
        second._lose("gone")  # the request goes on at the first one
        assert [each.cached.num_cached(leader.block_names) for each in (first, second)] == [10, 0]
        lost.abort()
        assert not first.cached._prompts and not first.cached._expected
        first._finish("gone")
        second._finish("gone")

    run(test)


def test_prompts_that_begin_alike_come_together() -> None:
    """If nothing else decides. Every front end decides alike."""

    async def test() -> None:
        chosen = []
        for _ in range(2):
            engine, clients = front_end_of(4)
            for i in range(40):
                made = prompt(33, first=i + 1)
                engine.submit(made)
                state = engine._requests.outputs._requests[made.request_id]
                chosen.append(state.engine)
                for client in clients:
                    report(client, 99)
            for client in clients:
                client._finish("gone")
        assert chosen[:40] == chosen[40:] and set(chosen) == {0, 1, 2, 3}

    run(test)


def test_of_windows_the_last_cached_blocks_count() -> None:
    """Blocks that the windows have left behind are evicted first, and nobody needs them."""
    index, names = CachedIndex(), [bytes([65 + i]) * 32 for i in range(6)]
    for kinds, expected in (((0,), [0, 0, 6]), ((1,), [4, 0, 6]), ((2,), [4, 0, 6]), ((3,), [0, 0, 6])):
        stored = b"".join(name + b"\0" for name in names[2:4])
        index.apply(CachedBlocks(stored=stored, removed=b"", is_first=True, kinds=kinds))
        asked = [b"".join(names), b"".join(names[:2]), b"".join(names)]
        more = index.entries(b"".join(names))
        assert [index.num_cached(each, extra) for each, extra in zip(asked, ((), (), more), strict=True)] == expected


def test_the_index_of_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_index, "MAX_INDEX_BYTES", 5 * cached_index.ENTRY_BYTES)
    block_names = prompt(97).block_names
    a, b, c, d, e, f = (block_names[i : i + 32] + b"\0" for i in range(0, 192, 32))
    index = CachedIndex()
    index.apply(CachedBlocks(stored=a + b + d, removed=c))
    assert index.num_cached(block_names) == 2
    index.apply(CachedBlocks(stored=c + e + f, removed=b""))  # no room for the last one
    assert index.num_cached(block_names) == 5
    index.expect("r", block_names)  # there is no room for it
    index.forget("r")
    index.forget("unknown")
    assert index.num_cached(block_names) == 5
    index.apply(CachedBlocks(stored=b"", removed=a))
    assert index.num_cached(block_names) == 0 and len(index) == 4
    index.apply(CachedBlocks(stored=a, removed=b"", is_first=True))
    assert index.num_cached(block_names) == 1 and len(index) == 1
    assert index.num_cached(b"") == 0


# -- losses ----------------------------------------------------------------------------------------------------------


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
        with pytest.raises(
            InvalidRequestError, match=f"names no replica; this server has the replicas {numbers[0]} to 4"
        ):
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
