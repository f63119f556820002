"""The engine's process is lost: who starts it again, which requests go on, and when the engine is given up."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight.engine.process import engine_keeper, engine_process
from inflight.engine.process.engine_process import EngineProcess
from inflight.errors import EngineDeadError, EngineRecoveringError
from inflight.interface.request import MAX_FAULTS
from inflight.processes.child_process import ChildProcess, stop_processes
from inflight.processes.line_wire import LineWire
from inflight.sampling_params import SamplingParams
from tests.unit.engine.process.core_process_cases import BROKEN, pid_of
from tests.unit.engine.serving.event_loop import run, until
from tests.unit.engine.serving.serving import endless, mock_engine, read, reasons_of, submit, tokens_of


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_in_another_process(number: signal.Signals) -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            truth = tokens_of(await read(await submit(engine, "truth", "x", endless(400))))
            streams = [await submit(engine, str(i), "x", endless(400)) for i in range(4)]
            first = [await stream.__anext__() for stream in streams]
            os.kill(pid_of(engine), number)
            start = time.monotonic()
            await until(lambda: engine.fault_status.state == "recovering")
            assert time.monotonic() - start < 60
            with pytest.raises(EngineRecoveringError, match=r"recovers from a fault \(engine_died\)"):
                await engine.check_ready()
            await engine.check_health()
            await engine.reset_prefix_cache()
            late = await submit(engine, "late", "x", endless(400))
            for begun, stream in zip(first, streams, strict=True):
                assert tokens_of([begun, *await read(stream)]) == truth
            assert tokens_of(await read(late)) == truth
            await until(lambda: engine.fault_status.num_resumed_requests == 4)
            await until(lambda: engine.fault_status.num_recoveries == {"engine_died": 1})
            assert engine.fault_status.state == "healthy"

    run(test)


def test_a_spare_process_takes_the_place_of_the_engine() -> None:
    async def test() -> None:
        async with mock_engine({"fault_tolerance_config": {"spare_workers": 1}}) as engine:
            keeper = engine._keepers[0]
            assert keeper is not None
            truth = tokens_of(await read(await submit(engine, "truth", "x", endless(400))))
            await until(lambda: keeper._spare is not None)
            assert keeper._spare is not None
            spare = keeper._spare.process.pid
            os.kill(spare, signal.SIGKILL)  # then there is another one
            await until(lambda: keeper._spare is not None and keeper._spare.process.pid != spare)
            spare = keeper._spare.process.pid
            await until(lambda: "spare" in Path(f"/proc/{spare}/cmdline").read_text())  # empty until it runs Python
            assert engine.fault_status.num_recoveries == {}
            stream = await submit(engine, "a", "x", endless(400))
            await stream.__anext__()
            os.kill(pid_of(engine), signal.SIGKILL)
            await until(lambda: engine.fault_status.num_recoveries == {"engine_died": 1})
            assert tokens_of(await read(await submit(engine, "b", "x", endless(400)))) == truth
            assert pid_of(engine) == spare
            assert "spare" not in Path(f"/proc/{spare}/cmdline").read_text()

    run(test)


def test_requests_in_flight_fail_if_they_may_not_resume() -> None:
    async def test() -> None:
        changes = {"fault_tolerance_config": {"resume_requests_after_recovery": False}}
        async with mock_engine(changes) as engine:
            stream = await submit(engine, "a", "x", endless())
            await stream.__anext__()
            os.kill(pid_of(engine), signal.SIGKILL)
            with pytest.raises(EngineRecoveringError, match="was lost during this request"):
                await read(stream)
            assert reasons_of(await read(await submit(engine, "b", "x", endless(5)))) == ["length"]

    run(test)


def test_the_prefix_cache_of_an_engine_that_dies_counts_as_forgotten() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            os.kill(pid_of(engine), signal.SIGSTOP)  # so that the call waits when the process dies
            reset = asyncio.create_task(engine.reset_prefix_cache())
            await asyncio.sleep(0.1)
            os.kill(pid_of(engine), signal.SIGKILL)
            await asyncio.wait_for(reset, 300)

    run(test)


def test_a_process_that_cannot_be_started_at_once_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the engine works, too, while there is no process."""
    num_failures = [0]

    class NoProcess:
        def __init__(self, *_: object, **__: object) -> None:
            num_failures[0] += 1
            raise BlockingIOError(errno.EAGAIN, "fork failed")

    async def test() -> None:
        async with mock_engine() as engine:
            stream = await submit(engine, "a", "x", endless(400))
            with monkeypatch.context() as patched:
                patched.setattr(engine_keeper, "EngineProcess", NoProcess)
                os.kill(pid_of(engine), signal.SIGKILL)
                await until(lambda: num_failures[0] == 2)
            assert reasons_of(await read(stream)) == ["length"]
            await until(lambda: engine.fault_status.num_recoveries == {"engine_died": 1})
            monkeypatch.setattr(engine_keeper, "EngineProcess", NoProcess)
            os.kill(pid_of(engine), signal.SIGKILL)
            await until(lambda: num_failures[0] == 3)
            await engine.close()

    run(test)


def test_an_engine_that_is_closed_while_it_replaces_its_process_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lost process is being closed when that is cancelled."""
    stopping, may_stop = threading.Event(), threading.Event()

    def stop(processes: Iterable[ChildProcess], seconds: float) -> None:
        stopping.set()
        may_stop.wait(300)
        stop_processes(processes, seconds)

    async def test() -> None:
        async with mock_engine() as engine:
            process = engine._keepers[0].process
            assert process is not None
            monkeypatch.setattr(engine_process, "stop_processes", stop)
            os.kill(process.process.pid, signal.SIGKILL)
            await asyncio.to_thread(stopping.wait, 60)
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0.1)
            may_stop.set()
            await closing
        assert process._control.fileno() == -1

    run(test)


def test_after_the_last_recovery_the_engine_is_given_up() -> None:
    async def test() -> None:
        async with mock_engine({"fault_tolerance_config": {"max_recoveries": 0}}) as engine:
            stream = await submit(engine, "a", "x", endless())
            os.kill(pid_of(engine), signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="max_recoveries"):
                await read(stream)
            assert engine.fault_status.state == "failed"

    run(test)


def test_a_recovery_that_takes_too_long_is_given_up() -> None:
    async def test() -> None:
        async with mock_engine({"fault_tolerance_config": {"engine_recovery_timeout_sec": 0.05}}) as engine:
            stream = await submit(engine, "a", "x", endless())
            os.kill(pid_of(engine), signal.SIGKILL)
            with pytest.raises(EngineDeadError, match=r"did not start again within 0\.05 s"):
                await read(stream)

    run(test)


@pytest.mark.parametrize("token", [16, 17])
def test_a_request_that_kills_the_core_ends_alone(token: int) -> None:
    """With 16 its first step ends the process, with 17 its first decode."""

    async def test() -> None:
        async with mock_engine({"distributed_executor_backend": BROKEN + "FailingExecutor"}) as engine:
            truth = tokens_of(await read(await submit(engine, "truth", "x", endless(400))))
            streams = [await submit(engine, str(i), "x", endless(400)) for i in range(3)]
            first = [await stream.__anext__() for stream in streams]
            bad = await submit(engine, "bad", [token], endless())
            streams += [await submit(engine, str(i), "x", endless(400)) for i in range(3, 6)]
            last = (await read(bad))[-1]
            assert last.error_kind == "engine" and "its process ended each time it computed this" in last.error
            for begun, stream in zip([*first, None, None, None], streams, strict=True):
                assert tokens_of([*([begun] if begun else []), *await read(stream)]) == truth
            await until(lambda: engine.fault_status.num_recoveries == {"engine_died": MAX_FAULTS + 1})
            assert len(engine._keepers[0]._guilty) == 1

    run(test)


def test_the_siblings_of_a_request_that_kills_the_core_end_with_it() -> None:
    """Otherwise each of the n sequences would end the process once more."""

    async def test() -> None:
        async with mock_engine({"distributed_executor_backend": BROKEN + "FailingExecutor"}) as engine:
            bad = await submit(engine, "bad", [16], SamplingParams(max_tokens=50, n=4, seed=1))
            last = (await read(bad))[-1]
            assert last.error_kind == "engine" and all(each.finish_reason == "error" for each in last.outputs)
            await until(lambda: engine.fault_status.num_recoveries == {"engine_died": MAX_FAULTS + 1})

    run(test)


def test_an_engine_that_sends_damaged_bytes_is_replaced() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            truth = tokens_of(await read(await submit(engine, "truth", "x", endless(20))))
            process, client = pid_of(engine), engine._replicas.engines[0]._client
            damage = b"\xff" * 4096
            client.get_buffer(len(damage))[: len(damage)] = damage
            client.buffer_updated(len(damage))
            await until(lambda: engine.fault_status.state == "recovering")
            assert "not a valid message" in engine.fault_status.last_cause
            assert tokens_of(await read(await submit(engine, "late", "x", endless(20)))) == truth
            assert pid_of(engine) != process
            await until(lambda: engine.fault_status.num_recoveries == {"engine_died": 1})

    run(test)


def test_a_process_that_dies_just_after_it_was_ready_counts_as_ready() -> None:
    """The end of the process may be noticed before its last messages are read."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = object.__new__(EngineProcess)
            process._loop, process._control, process._wire = asyncio.get_running_loop(), ours, LineWire(ours)
            process.process = SimpleNamespace(pidfd=theirs.fileno())  # type: ignore[assignment]
            process._has_news, process.is_ready = asyncio.Event(), False
            theirs.sendall(b'{"ready": true}\n')
            process._record_end()
            assert process.is_ready and process.has_ended

    run(test)
