"""The engine core's process: several front ends, deaths on either side, starts that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.engine.process import engine_process
from inflight.engine.process.core_process import CoreServer
from inflight.engine.process.engine_process import EngineProcess
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.start.model_files import resolve_config
from inflight.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    InflightError,
    ModelNotFoundError,
    OutOfMemoryError,
)
from inflight.processes.child_process import ChildProcess
from inflight.processes.streams import BlockingStream
from tests.support.processes import children, exists, have_ended
from tests.unit.engine.process.core_process_cases import BROKEN, MORTAL, pid_of, sockets
from tests.unit.engine.serving.event_loop import run, until
from tests.unit.engine.serving.serving import (
    endless,
    mock_args,
    mock_engine,
    read,
    reasons_of,
    stats_of,
    submit,
    tokens_of,
)
from tests.unit.executor.processes import run_script


def test_when_the_engine_is_killed_every_stream_hears_of_it() -> None:
    async def test() -> None:
        async with mock_engine(MORTAL) as engine:
            streams = [await submit(engine, str(i), "x", endless()) for i in range(10)]
            await streams[0].__anext__()
            start = time.monotonic()
            os.kill(pid_of(engine), signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="process is gone"):
                    await read(stream)
            assert time.monotonic() - start < 60
            assert len(engine._requests) == 0
            for call in (engine.check_health, engine.check_ready):
                with pytest.raises(EngineDeadError):
                    await call()
            request = await engine.process("late", "x", endless())
            with pytest.raises(EngineDeadError):
                engine.submit(request)

    run(test)


def test_when_the_front_end_is_killed_the_engine_ends() -> None:
    script = """
    import asyncio
    from tests.unit.engine.serving.serving import *
    async def main():
        async with mock_engine() as engine:
            stream = await submit(engine, "a", "x", endless())
            await stream.__anext__()
            print("up", flush=True)
            await asyncio.sleep(3600)
    asyncio.run(main())
    """
    process = run_script(script)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        engines = children(process.pid)
        assert len(engines) == 1
        process.kill()
        assert have_ended(engines)
    finally:
        process.kill()
        process.communicate()


def test_signals_to_the_group_leave_the_engine_to_its_front_end() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            stream = await submit(engine, "a", "x", endless(60))
            await stream.__anext__()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid_of(engine), number)
            assert reasons_of(await read(stream)) == ["length"]
            pid = pid_of(engine)
        assert not exists(pid)

    run(test)


def test_several_front_ends_share_one_engine() -> None:
    async def test() -> None:
        args = mock_args(max_num_seqs=8)
        process = EngineProcess(args, resolve_config(args))
        process.begin((0, 1))
        try:
            first, second = await asyncio.gather(
                *(AsyncLLM.attach(args, sockets(process.sockets.pop(i))) for i in (0, 1))
            )
            streams = [await submit(engine, "same", "x", endless(1000)) for engine in (first, second)]  # the same ids
            seeds = {stream.request.sequences[0].sampling.seed for stream in streams}
            assert len(seeds) == 2, "front ends without a seed draw the same"
            ends = [await submit(engine, "end", "y", endless(20)) for engine in (first, second)]
            for stream in ends:
                assert len(tokens_of(await read(stream))) == 20
            await until(lambda: stats_of(second).num_running == 2)
            await first.close()
            await until(lambda: stats_of(second).num_running == 1)  # those of the first one were aborted
            assert process.process.is_alive
            streams[1].abort()
            await read(streams[1])
            await second.close()
        finally:
            await process.close()
        assert process.process.exit_code == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(process.process.pidfd)  # each recovery would leave one

    run(test)


def test_a_front_end_that_sends_nonsense_is_dropped_alone() -> None:
    async def test() -> None:
        args = mock_args()
        process = EngineProcess(args, resolve_config(args))
        process.begin((0, 1))
        nonsense, good = process.sockets.pop(1), process.sockets.pop(0)
        try:
            engine = await AsyncLLM.attach(args, sockets(good))
            nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert len(tokens_of(await read(await submit(engine, "a", "x", endless(20))))) == 20
            await engine.close()
        finally:
            nonsense.close()
            await process.close()

    run(test)


def test_a_process_that_ends_before_it_is_told_what_to_start_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children(os.getpid())

    def send(stream: BlockingStream, message: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(BlockingStream, "send", send)

    async def test() -> None:
        with pytest.raises(EngineDeadError, match=r"process is gone: process .* exit code 3"):
            await AsyncLLM.from_args(mock_args())

    run(test)
    assert set(children(os.getpid())) <= set(before)


def test_a_start_that_is_given_up_at_once_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children(os.getpid())
    begun = threading.Event()

    class SlowProcess(ChildProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            begun.set()
            time.sleep(0.2)

    monkeypatch.setattr(engine_process, "ChildProcess", SlowProcess)

    async def test() -> None:
        start = asyncio.create_task(AsyncLLM.from_args(mock_args()))
        assert await asyncio.to_thread(begun.wait, 300.0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run(test)
    assert set(children(os.getpid())) <= set(before)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "/no/such/folder"}, ModelNotFoundError, "no folder '/no/such/folder'"),
        ({"tokenizer": "/tmp"}, ConfigError, "tokenizer.json"),
        ({"distributed_executor_backend": BROKEN + "TooLarge"}, OutOfMemoryError, "^it does not fit$"),
        ({"distributed_executor_backend": BROKEN + "Defective"}, EngineError, "ZeroDivisionError: a defect"),
        ({"distributed_executor_backend": BROKEN + "Vanishing"}, EngineDeadError, "gone: process .* exit code 9"),
        ({"distributed_executor_backend": BROKEN + "NO_EXECUTOR"}, ConfigError, "must be a subclass of"),
        ({"distributed_executor_backend": BROKEN + "Missing"}, ConfigError, "cannot be imported: AttributeError"),
        ({"distributed_executor_backend": "no.such:Thing"}, ConfigError, "cannot be imported: ModuleNotFoundError"),
        ({"kv_cache_memory_bytes": 1000}, OutOfMemoryError, "KV"),
    ],
)
def test_a_start_that_fails_raises_what_was_raised_there(
    changes: dict[str, Any], kind: type[InflightError], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = children(os.getpid())

    async def test() -> None:
        with pytest.raises(kind, match=message) as caught:
            async with mock_engine(changes):
                pass
        assert type(caught.value) is kind or kind is ConfigError

    run(test)
    assert set(children(os.getpid())) <= set(before)
    assert ("Traceback" in capfd.readouterr().err) == (message == "ZeroDivisionError: a defect")


def test_outputs_that_cannot_be_sent_end_the_engines_process() -> None:
    script = """
    import socket, time
    from inflight.engine.process.outbox import Outbox
    from inflight.processes.streams import BlockingStream
    ours, theirs = socket.socketpair()
    Outbox(BlockingStream(ours), "outbox").send("no message")
    time.sleep(3600)
    """
    process = run_script(script)
    assert "cannot be sent" in process.communicate(timeout=300)[1]
    assert process.returncode == 1


def test_the_owner_knows_which_request_runs_alone_and_when_none_does_any_more() -> None:
    """Otherwise a request that has made progress would end when the process is lost later."""
    told: list[object] = []
    quarantine = SimpleNamespace(lone=None)
    server: Any = CoreServer(told.append)
    server._core = SimpleNamespace(scheduler=SimpleNamespace(quarantine=quarantine))
    for lone in (None, "a", "a", None, None, "b"):
        quarantine.lone = None if lone is None else SimpleNamespace(request_id=lone)
        server.before_plan()
    assert told == [{"lone_request": "a"}, {"lone_request": ""}, {"lone_request": "b"}]


def test_a_name_that_is_no_class_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"package\.module:ClassName"):
        EngineArgs(distributed_executor_backend="no such thing")
