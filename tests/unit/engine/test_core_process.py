"""The engine core's process: several front ends, deaths on either side, failing steps, starts that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.config.engine_args import EngineArgs
from inflight.engine import engine_process
from inflight.engine.async_llm import AsyncLLM
from inflight.engine.control_socket import FrontEndLink
from inflight.engine.core_client import CoreClient
from inflight.engine.core_process import CoreServer
from inflight.engine.engine_process import EngineProcess
from inflight.engine.engine_sockets import EngineSockets
from inflight.engine.front_end import resolve_config
from inflight.engine.outbox import Outbox
from inflight.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    InflightError,
    ModelNotFoundError,
    OutOfMemoryError,
    StepError,
)
from inflight.executor.failures import failure_of
from inflight.executor.process import ChildProcess
from inflight.executor.transport import BlockingStream
from inflight.interface.request import EngineCoreOutput, FinishReason, LogprobsColumns
from inflight.interface.serving import AbortRequests, EngineDied, EngineOutputs, EngineReady, EngineStartFailed
from inflight.interface.statistics import SchedulerStats
from inflight.interface.step import ModelRunnerOutput
from tests.unit.engine.serving import endless, mock_args, mock_engine, read, reasons_of, submit, tokens_of
from tests.unit.engine.test_async_llm import run, until
from tests.unit.executor.processes import children, exists, have_ended, run_script

BROKEN = "tests.unit.engine.broken_executor:"
MORTAL = {"enable_fault_tolerance": False}  # the engine is not started again


def pid_of(engine: AsyncLLM) -> int:
    assert engine._keeper is not None and engine._keeper.process is not None
    return engine._keeper.process.process.pid


def sockets(engine_socket: socket.socket) -> EngineSockets:
    """The sockets of a front end that gets only this one."""
    found = EngineSockets()
    found.put(engine_socket)
    return found


# -- deaths ------------------------------------------------------------------------------------------------------------


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
            assert time.monotonic() - start < 1.0
            assert engine.num_unfinished_requests == 0
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
    from tests.unit.engine.serving import *
    async def main():
        async with mock_engine() as engine:
            stream = await submit(engine, "a", "x", endless())
            await stream.__anext__()
            print("up", flush=True)
            await asyncio.sleep(60)
    asyncio.run(main())
    """
    process = run_script(script)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        engines = children(process.pid)
        assert len(engines) == 1
        process.kill()
        assert have_ended(engines, 3.0)
    finally:
        process.kill()
        process.communicate()


def test_signals_to_the_group_leave_the_engine_to_its_front_end() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            stream = await submit(engine, "a", "x", endless(60))
            await stream.__anext__()
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid_of(engine), number)
            assert reasons_of(await read(stream)) == ["length"]
            pid = pid_of(engine)
        assert not exists(pid)

    run(test)


# -- several front ends ----------------------------------------------------------------------------------------------


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
            seeds = {stream.request.children[0].sampling.seed for stream in streams}
            assert len(seeds) == 2, "front ends without a seed draw the same"
            ends = [await submit(engine, "end", "y", endless(20)) for engine in (first, second)]
            for stream in ends:
                assert len(tokens_of(await read(stream))) == 20
            await until(lambda: second._admission._stats.num_running == 2)
            await first.close()
            await until(lambda: second._admission._stats.num_running == 1)  # those of the first one were aborted
            assert process.process.is_alive
            streams[1].abort()
            await read(streams[1])
            await second.close()
        finally:
            await process.close()
        assert process.process.exit_code == 0

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


# -- failures ----------------------------------------------------------------------------------------------------------


FAILING = {"distributed_executor_backend": BROKEN + "FailingExecutor"}
DYING = {"distributed_executor_backend": BROKEN + "DyingExecutor"}


@pytest.mark.parametrize(("token", "reason"), [(13, "thirteen"), (14, "fourteen"), (15, "fifteen")])
def test_a_request_that_fails_its_steps_or_its_rank_ends_alone(token: int, reason: str) -> None:
    """With 14 the rank dies each time, with 15 it cannot compute any more. A new one takes its place."""

    async def test() -> None:
        async with mock_engine(FAILING) as engine:
            other = await submit(engine, "other", "x", endless(300))
            truth = tokens_of(await read(await submit(engine, "truth", "x", endless(300))))
            bad = await submit(engine, "bad", [token], endless())
            last = (await read(bad))[-1]
            assert last.outputs[0].finish_reason == "error"
            assert reason in last.error and "\n" not in last.error
            assert tokens_of(await read(other)) == truth
            assert len(tokens_of(await read(await submit(engine, "good", "x", endless(10))))) == 10
            await engine.check_health()

    run(test)


def test_a_rank_that_dies_while_nobody_asks_for_anything_is_replaced() -> None:
    async def test() -> None:
        async with mock_engine(DYING) as engine:
            await asyncio.sleep(1.0)
            assert len(tokens_of(await read(await submit(engine, "good", "x", endless(10))))) == 10

    run(test)


def test_without_fault_tolerance_a_step_that_fails_ends_its_requests_and_the_engine_goes_on() -> None:
    async def test() -> None:
        async with mock_engine(FAILING | MORTAL) as engine:
            other = await submit(engine, "other", "x", endless())
            await other.__anext__()
            bad = await submit(engine, "bad", [13], endless())
            for stream in (other, bad):
                last = (await read(stream))[-1]
                assert last.outputs[0].finish_reason == "error"
                assert "thirteen" in last.error
                assert "\n" not in last.error
            assert len(tokens_of(await read(await submit(engine, "good", "x", endless(10))))) == 10
            await engine.check_health()

    run(test)


def test_requests_that_are_in_no_failed_step_go_on() -> None:
    async def test() -> None:
        async with mock_engine(FAILING | {"max_num_seqs": 1}) as engine:
            first = await submit(engine, "first", "x", endless(100))
            others = [await submit(engine, str(i), [13] if i in (1, 2) else "x", endless(5)) for i in range(4)]
            assert reasons_of(await read(first)) == ["length"]
            for i, stream in enumerate(others):
                assert reasons_of(await read(stream)) == ["error" if i in (1, 2) else "length"]

    run(test)


def test_a_failure_that_names_no_request_ends_all_that_are_there() -> None:
    ours, theirs = socket.socketpair()
    link, aborted = FrontEndLink(0, BlockingStream(ours)), list[list[str]]()
    server, step_error = CoreServer([link]), StepError("bad luck", rank=0, request_ids=["b", "ended"])
    server._core = SimpleNamespace(abort_requests=aborted.append, take_stats=lambda: stats(1))  # type: ignore[assignment]
    for error in (step_error, EngineError("none can be scheduled")):
        server._owners = dict.fromkeys("abc", link)
        server._fail_step(error)
    assert aborted == [["b"], ["a", "b", "c"]]
    link.outbox.close(1.0)
    ours.close()
    theirs.close()


def test_an_arrival_ends_the_wait_for_a_step_and_so_does_the_step() -> None:
    ours, theirs = socket.socketpair()
    link, aborted = FrontEndLink(0, BlockingStream(ours)), list[set[str]]()
    server, step = CoreServer([link]), Future[ModelRunnerOutput]()
    server._core = SimpleNamespace(abort_requests=aborted.append)  # type: ignore[assignment]
    server._owners = {"a": link}
    server._arrivals.put(None)  # an executor's news end no wait
    threading.Timer(0.01, server._arrivals.put, [(link, AbortRequests(request_ids=("a",)))]).start()
    assert server._wait_for_arrival(step) and aborted == [{"a"}]
    threading.Timer(0.01, step.cancel).start()
    assert not server._wait_for_arrival(step)
    assert not server._wait_for_arrival(step), "one that is done is not waited for"
    assert server._arrivals.empty(), "each step wakes the loop once"
    link.outbox.close(1.0)
    ours.close()
    theirs.close()


def test_a_rank_that_cannot_compute_any_more_is_the_end_of_the_engine() -> None:
    async def test() -> None:
        async with mock_engine(FAILING | MORTAL) as engine:
            with pytest.raises(
                EngineDeadError, match=r"the engine has failed: .* on rank 0: ValueError: fifteen"
            ) as error:
                await read(await submit(engine, "bad", [15], endless()))
            assert error.value.summary == "a step failed on rank 0 (ValueError)"
            for call in (engine.check_health, engine.check_ready):
                with pytest.raises(EngineDeadError, match="fifteen"):
                    await call()

    run(test)


def test_a_rank_that_dies_while_nobody_asks_for_anything_is_the_end_of_the_engine() -> None:
    async def test() -> None:
        async with mock_engine(DYING | MORTAL) as engine:
            await until(lambda: bool(engine._death))
            with pytest.raises(EngineDeadError, match=r"the engine has failed: .*rank 0 is gone \(old age\)") as error:
                await engine.check_health()
            assert error.value.summary == "rank 0 has died"

    run(test)


def test_a_lost_rank_is_the_end_of_the_engine() -> None:
    async def test() -> None:
        async with mock_engine(FAILING | MORTAL) as engine:
            stream = await submit(engine, "bad", [14], endless())
            with pytest.raises(EngineDeadError, match="rank 0 died"):
                await read(stream)
            with pytest.raises(EngineDeadError, match=r"the engine has failed: .*rank 0"):
                await engine.check_health()
            assert await asyncio.to_thread(have_ended, [pid_of(engine)], 3.0)
            assert engine._keeper is not None and engine._keeper.process is not None
            assert engine._keeper.process.process.exit_code == 1

    run(test)


def test_the_news_that_the_engine_has_died_is_the_end_though_its_process_still_runs() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        reasons: list[str] = []
        client = CoreClient()
        client.on_end = reasons.append
        await client.connect(ours)
        engine = BlockingStream(theirs)
        engine.send(EngineDied(reason="rank 0 is lost"))
        await asyncio.wait_for(client.closed, 5.0)
        assert reasons == ["the engine has failed: rank 0 is lost"]
        engine.close()

    run(test)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_front_end_that_starts_while_the_engine_dies_waits_for_the_next_engine(is_given_up: bool) -> None:
    """The first engine dies before it is ready, the second one cannot start."""

    async def test() -> None:
        arriving, engines = EngineSockets(), []
        for _ in range(2 if is_given_up else 3):
            ours, theirs = socket.socketpair()
            engines.append(BlockingStream(theirs))
            arriving.put(ours)
        engines[0].send(EngineDied(reason="rank 0 is lost"))
        engines[1].send(EngineStartFailed(failure=failure_of(OutOfMemoryError("it does not fit"))))
        engines[1].close()
        if is_given_up:
            arriving.fail(EngineDeadError("no more recoveries"))
            with pytest.raises(OutOfMemoryError, match="it does not fit"):
                await AsyncLLM.attach(mock_args(), arriving)
        else:
            engines[2].send(EngineReady(front_end=7, num_kv_cache_tokens=1000))
            engine = await AsyncLLM.attach(mock_args(), arriving)
            assert engine.model.num_kv_cache_tokens == 1000
            await engine.close()
        for stream in engines:
            stream.close()

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
    assert children(os.getpid()) == before


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
        assert await asyncio.to_thread(begun.wait, 10.0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run(test)
    assert children(os.getpid()) == before


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
    assert children(os.getpid()) == before
    assert ("Traceback" in capfd.readouterr().err) == (message == "ZeroDivisionError: a defect")


# -- what is unsent ----------------------------------------------------------------------------------------------------


COUNTS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "num_generation_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
)


def stats(step_id: int, **changes: Any) -> SchedulerStats:
    return SchedulerStats(
        step_id=step_id, num_running=1, num_waiting=step_id, num_waiting_tokens=0, kv_cache_usage=0.0, **changes
    )


def test_an_outbox_merges_what_its_front_end_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outbox = Outbox(BlockingStream(ours), "outbox")
    count, sequences = 3000, 8
    for step in range(count):
        outputs = []
        for i in range(sequences):
            columns = LogprobsColumns(
                token_ids=np.full((1, 1), step, np.int32),
                logprobs=np.zeros((1, 1), np.float32),
                ranks=np.ones(1, np.int32),
            )
            reason = FinishReason.LENGTH if step == count - 1 else None
            outputs.append(
                EngineCoreOutput(request_id=str(i), new_token_ids=(step,), logprobs=columns, finish_reason=reason)
            )
        outbox.put(outputs, step, stats(step, step_gaps=(float(step),), **dict.fromkeys(COUNTS, 1)))
    assert len(outbox._outputs) == sequences
    reader, found = BlockingStream(theirs), list[EngineOutputs]()
    while not found or found[-1].stats is None or found[-1].stats.step_id < count - 1:
        message = reader.receive()
        assert isinstance(message, EngineOutputs)
        found.append(message)
    assert len(found) < count / 10
    for name in COUNTS:
        assert sum(getattr(message.stats, name) for message in found if message.stats) == count
    assert found[-1].stats is not None
    assert (found[-1].stats.num_waiting, found[-1].num_received) == (count - 1, count - 1)
    for i in range(sequences):
        own = [output for message in found for output in message.outputs if output.request_id == str(i)]
        assert [token for output in own for token in output.new_token_ids] == list(range(count))
        assert np.concatenate([o.logprobs.token_ids[:, 0] for o in own if o.logprobs]).tolist() == list(range(count))
        assert [output.finish_reason for output in own][-1] is FinishReason.LENGTH
    outbox.close(1.0)
    ours.close()
    reader.close()


def test_outputs_that_cannot_be_sent_end_the_engines_process() -> None:
    script = """
    import socket, time
    from inflight.engine.outbox import Outbox
    from inflight.executor.transport import BlockingStream
    ours, theirs = socket.socketpair()
    Outbox(BlockingStream(ours), "outbox").send("no message")
    time.sleep(5)
    """
    process = run_script(script)
    assert "cannot be sent" in process.communicate(timeout=20)[1]
    assert process.returncode == 1


def test_a_name_that_is_no_class_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"package\.module:ClassName"):
        EngineArgs(distributed_executor_backend="no such thing")
