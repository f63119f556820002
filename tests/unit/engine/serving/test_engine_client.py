"""`EngineClient`: what a front end is told when the engine's process is lost, is there again, or is given up.

The test plays the engine, at the other end of a socket. So nothing here waits for a process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.serving import engine_client
from inflight.engine.serving.engine_client import EngineClient, EngineState
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.errors import EngineDeadError, OutOfMemoryError
from inflight.executor.failures import failure_of
from inflight.interface.codec import Message
from inflight.interface.request import EngineCoreOutput
from inflight.interface.serving import (
    AbortRequests,
    EngineDied,
    EngineOutputs,
    EngineReady,
    EngineStartFailed,
    PrefixCacheReset,
    ResetPrefixCache,
)
from inflight.interface.statistics import FaultStatus
from inflight.processes.streams import BlockingStream
from tests.unit.engine.serving.event_loop import run, until

GONE = "the engine's process is gone"


def lost_because(client: EngineClient) -> str:
    return client._reason if client.state is EngineState.LOST else ""


class Played:
    """A connection, the sockets that it gets, and its listener. `events`: (what it was told, the argument)."""

    def __init__(self, *, is_remote: bool = False, **changes: Any) -> None:
        self.sockets = EngineSockets()
        faults = replace(FaultToleranceConfig(), **changes)
        self.connection = EngineClient(self.sockets, faults, self, is_remote=is_remote)
        self.events: list[tuple[str, object]] = []
        self.streams: list[BlockingStream] = []

    def new_process(self, *messages: Message) -> BlockingStream:
        """A process of the engine, which has sent these messages."""
        ours, theirs = socket.socketpair()
        self.sockets.put(ours)
        stream = BlockingStream(theirs)
        self.streams.append(stream)
        for message in messages:
            stream.send(message)
        return stream

    async def open(self, front_end: int = 3) -> BlockingStream:
        stream = self.new_process(EngineReady(front_end=front_end, num_kv_cache_tokens=10))
        assert (await self.connection.open()).front_end == front_end
        return stream

    def process(self, outputs: Sequence[EngineCoreOutput]) -> None:
        self.events.append(("process", outputs))

    def outputs_arrived(self, engine: EngineClient, message: EngineOutputs) -> None:
        self.events.append(("outputs", message))

    def faults_changed(self, engine: EngineClient, status: FaultStatus) -> None:
        self.events.append(("faults", (status.state, status.last_cause)))

    def engine_lost(self, engine: EngineClient, reason: str) -> None:
        self.events.append(("lost", reason))

    def engine_restored(self, engine: EngineClient) -> None:
        self.events.append(("restored", lost_because(engine)))

    def engine_ended(self, engine: EngineClient, reason: str) -> None:
        self.events.append(("end", reason))

    async def has(self, name: str) -> None:
        await until(lambda: any(event[0] == name for event in self.events))

    async def close(self) -> None:
        await self.connection.close()
        for stream in self.streams:
            stream.close()


def names(played: Played) -> list[str]:
    return [name for name, _ in played.events]


def outputs(num_received: int) -> EngineOutputs:
    return EngineOutputs(outputs=(), num_received=num_received, stats=None)


def test_a_lost_process_is_told_and_the_next_one_is_used_when_it_is_ready() -> None:
    async def test() -> None:
        played = Played()
        connection, first = played.connection, await played.open()
        assert (lost_because(connection), connection.fault_status.state) == ("", "healthy")
        first.send(outputs(1))
        await played.has("outputs")
        first.close()
        await played.has("lost")
        assert played.events[1:] == [("faults", ("recovering", GONE)), ("lost", GONE)]
        assert (lost_because(connection), connection.fault_status.last_cause) == (GONE, GONE)
        connection.send(AbortRequests(request_ids=("dropped",)))
        await connection.reset_prefix_cache()  # a new process has no cached blocks
        connection.pause()  # also without a process
        connection.resume()

        second = played.new_process()
        await asyncio.sleep(0)
        assert lost_because(connection) == GONE  # the new process loads its model
        second.send(EngineReady(front_end=3, num_kv_cache_tokens=10))
        await played.has("restored")
        second.send(outputs(2))
        await until(lambda: len(played.events) == 6)
        assert played.events[3:] == [("faults", ("healthy", "")), ("restored", ""), ("outputs", outputs(2))]
        connection.send(AbortRequests(request_ids=("sent",)))
        assert second.receive((AbortRequests,)) == AbortRequests(request_ids=("sent",))

        second.close()  # and once more
        await until(lambda: played.events.count(("lost", GONE)) == 2)
        played.new_process(EngineReady(front_end=3, num_kv_cache_tokens=10))
        await until(lambda: played.events.count(("restored", "")) == 2)
        assert not any(name == "end" for name, _ in played.events)
        await played.close()

    run(test)


def test_a_replica_on_another_machine_may_be_away_for_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may be away when this front end starts. Its sockets are TCP."""

    async def test() -> None:
        monkeypatch.setattr(engine_client, "GRACE_SECONDS", 0.0)
        played = Played(is_remote=True, engine_recovery_timeout_sec=0.01)
        connection = played.connection
        played.sockets.fail(EngineDeadError("the machine of the replica is away"))
        with pytest.raises(EngineDeadError, match="is away"):
            await connection.open()
        assert (connection.state, connection.fault_status.state) == (EngineState.LOST, "recovering")
        await asyncio.sleep(0.1)  # it has been away for longer than a recovery may take
        assert connection.state is EngineState.LOST
        for number in range(2):
            with socket.create_server(("127.0.0.1", 0)) as listening:
                ours = socket.create_connection(listening.getsockname())
                theirs, _ = listening.accept()
            played.sockets.put(ours)
            stream = BlockingStream(theirs)
            played.streams.append(stream)
            stream.send(EngineReady(front_end=3, num_kv_cache_tokens=10))
            await until(lambda number=number: names(played).count("restored") == number + 1)  # type: ignore[misc]
            connection.send(AbortRequests(request_ids=("sent",)))
            assert stream.receive((AbortRequests,)) == AbortRequests(request_ids=("sent",))
            stream.close()
            await until(lambda: connection.state is EngineState.LOST)
        lost = ["faults", "lost"]
        assert names(played) == [*lost, "faults", "restored", *lost, "faults", "restored", *lost]
        await played.close()

    run(test)


def test_what_the_engine_tells_of_its_faults_is_kept_while_its_process_is_lost() -> None:
    async def test() -> None:
        played = Played()
        engine = await played.open()
        engine.send(FaultStatus(num_recoveries={"rank_died": 2}, last_cause="rank 1 has died", epoch=4))
        await played.has("faults")
        assert played.events == [("faults", ("healthy", "rank 1 has died"))]
        engine.close()
        await played.has("lost")
        status = played.connection.fault_status
        assert (status.state, status.last_cause, status.epoch) == ("recovering", GONE, 4)
        assert status.num_recoveries == {"rank_died": 2}
        await played.close()

    run(test)


def test_without_fault_tolerance_a_lost_process_is_the_end() -> None:
    async def test() -> None:
        played = Played(enabled=False)
        engine = await played.open()
        engine.send(EngineDied(reason="rank 0 is lost", summary="rank 0 has died"))
        await played.has("end")
        assert played.events == [("faults", ("failed", "")), ("end", "the engine has failed: rank 0 is lost")]
        assert played.connection.summary == "rank 0 has died"
        assert (lost_because(played.connection), played.connection.fault_status.state) == ("", "failed")
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(played.connection.reset_prefix_cache(), 300)
        await played.close()
        assert len(played.events) == 2  # the end is told once

    run(test)


def test_a_defect_of_the_front_end_is_the_end() -> None:
    """Another process of the engine would not help."""

    async def test() -> None:
        played = Played()
        await played.open()
        played.connection.end("a defect")
        await played.has("end")
        await played.close()
        assert played.events == [("faults", ("failed", "")), ("end", "a defect")]

    run(test)


@pytest.mark.parametrize("is_lost", [False, True])
def test_closing_tells_the_end_once(is_lost: bool) -> None:
    """Also while no process is there. Sockets that come too late are closed."""

    async def test() -> None:
        played = Played()
        engine = await played.open()
        if is_lost:
            engine.close()
            await played.has("lost")
        await played.connection.close()
        late = played.new_process()
        await played.connection.close()
        ends = [argument for name, argument in played.events if name == "end"]
        assert len(ends) == 1 and (not is_lost or ends == [GONE])
        assert played.connection.fault_status.state == "failed"
        assert late.receive((AbortRequests,)) is None
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await played.close()

    run(test)


@pytest.mark.parametrize("is_told", [False, True])
def test_the_reason_for_giving_up_is_that_of_the_last_process(is_told: bool) -> None:
    """If the last process told why it could not start, this is the reason. Otherwise the owner of the process says it."""

    async def test() -> None:
        played = Played()
        engine = await played.open()
        engine.close()
        await played.has("lost")
        failed = EngineStartFailed(failure=failure_of(OutOfMemoryError("it does not fit")))
        played.new_process(failed).close()
        if not is_told:
            played.new_process().close()  # this one only dies
        played.sockets.fail(EngineDeadError("no more recoveries"))
        await played.has("end")
        reason = "it does not fit" if is_told else "no more recoveries"
        assert played.events[2:] == [("faults", ("failed", "")), ("end", reason)]
        assert lost_because(played.connection) == ""
        await played.close()

    run(test)


def test_a_recovery_that_takes_too_long_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "GRACE_SECONDS", 0.0)

    async def test() -> None:
        played = Played(engine_recovery_timeout_sec=0.01)
        engine = await played.open()
        engine.close()
        await played.has("end")
        assert played.events[-1] == ("end", f"{GONE}; the engine did not start again within 0.01 s")
        await played.close()

    run(test)


def test_the_owner_of_the_process_may_tell_the_reason_of_a_recovery_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The front end waits some seconds longer than the owner of the process does."""
    seconds: list[float | None] = []
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda delay: timeout((seconds.append(delay), delay)[1]))

    async def test() -> None:
        played = Played(engine_recovery_timeout_sec=77.0)
        engine = await played.open()
        engine.close()
        await played.has("lost")
        await asyncio.sleep(0)
        assert seconds[-1] is not None and 78.0 <= seconds[-1] <= 90.0
        await played.close()

    run(test)


def test_the_prefix_cache_is_reset_by_the_engine_and_each_call_gets_its_answer() -> None:
    async def test() -> None:
        played = Played()
        engine = await played.open()
        calls = [asyncio.create_task(played.connection.reset_prefix_cache()) for _ in range(2)]
        asked = [await asyncio.to_thread(engine.receive, (ResetPrefixCache,)) for _ in calls]
        ids = [message.call_id for message in asked if isinstance(message, ResetPrefixCache)]
        assert len(set(ids)) == 2
        engine.send(PrefixCacheReset(call_id=12345))  # of nobody
        engine.send(PrefixCacheReset(call_id=ids[1]))
        await asyncio.wait_for(calls[1], 300)
        assert not calls[0].done()
        engine.close()  # the process that follows has no cached blocks
        await asyncio.wait_for(calls[0], 300)
        await played.close()

    run(test)


def test_a_paused_connection_reads_nothing_until_it_is_resumed() -> None:
    async def test() -> None:
        played = Played()
        stream = await played.open()
        stream.send(outputs(1))
        await played.has("outputs")
        played.events.clear()
        played.connection.pause()
        stream.send(outputs(2))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert played.events == []
        played.connection.resume()
        await played.has("outputs")
        await played.close()

    run(test)
