"""Failing steps and lost ranks in the engine core's process: which requests end, and when the engine ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.engine.process.control_socket import FrontEndLink
from inflight.engine.process.core_process import CoreServer
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.errors import EngineDeadError, EngineError, OutOfMemoryError, StepError
from inflight.executor.failures import failure_of
from inflight.interface.serving import AbortRequests, EngineDied, EngineReady, EngineStartFailed
from inflight.interface.step import ModelRunnerOutput
from inflight.processes.streams import BlockingStream
from tests.support.processes import have_ended
from tests.unit.engine.process.core_process_cases import BROKEN, MORTAL, pid_of, stats
from tests.unit.engine.serving.event_loop import run, until
from tests.unit.engine.serving.serving import endless, mock_args, mock_engine, read, reasons_of, submit, tokens_of

FAILING = {"distributed_executor_backend": BROKEN + "FailingExecutor"}
DYING = {"distributed_executor_backend": BROKEN + "DyingExecutor"}


def tell_nobody(message: object) -> None:
    pass


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
    server, step_error = CoreServer(tell_nobody, [link]), StepError("bad luck", rank=0, request_ids=["b", "ended"])
    core: Any = SimpleNamespace(
        abort_requests=aborted.append, take_stats=lambda: stats(1), cached_names=None, block_events=None
    )
    server._core, server._executor = core, SimpleNamespace()  # type: ignore[assignment]  # nobody watches
    for error in (step_error, EngineError("none can be scheduled")):
        server._owners = dict.fromkeys("abc", link)
        server._fail_step(error)
    assert aborted == [["b"], ["a", "b", "c"]]
    link.outbox.close(1.0)
    ours.close()
    theirs.close()


def test_a_front_end_that_comes_while_the_engine_starts_hears_why_it_could_not() -> None:
    """Those of a replica on another machine do."""
    ours, theirs = socket.socketpair()
    server = CoreServer(tell_nobody)
    server.has_begun.set()
    server._arrivals.put(None)
    server.connect(FrontEndLink(3, BlockingStream(ours)), 0)
    failed = EngineStartFailed(failure=failure_of(OutOfMemoryError("it does not fit")))
    server.take_new_links()
    server.tell_all(failed)
    server.say_goodbye()
    assert BlockingStream(theirs).receive((EngineStartFailed,)) == failed
    theirs.close()
    assert server._arrivals.get(timeout=300) is not None  # the thread that reads has ended
    ours.close()


def test_nothing_of_a_front_end_that_is_gone_stays() -> None:
    """Also if there was nothing to send to it, as in a replica without requests."""
    ours, theirs = socket.socketpair()
    link = FrontEndLink(0, BlockingStream(ours))
    server = CoreServer(tell_nobody, [link])
    core: Any = SimpleNamespace(abort_requests=lambda _: None)
    server._core, server._executor = core, SimpleNamespace()  # type: ignore[assignment]  # nobody watches
    server._take((link, None))
    thread = link.outbox._thread
    thread.join(300.0)
    assert not thread.is_alive() and server._links == []
    ours.close()
    theirs.close()


def test_an_arrival_ends_the_wait_for_a_step_and_so_does_the_step() -> None:
    ours, theirs = socket.socketpair()
    link, aborted = FrontEndLink(0, BlockingStream(ours)), list[set[str]]()
    server, step = CoreServer(tell_nobody, [link]), Future[ModelRunnerOutput]()
    server._core = SimpleNamespace(abort_requests=aborted.append)  # type: ignore[assignment]
    server._owners = {"a": link}
    server.wake()
    assert server.wait_for_arrival(step) and aborted == [], (
        "the core is to look for news of an executor or another core"
    )
    threading.Timer(0.01, server._arrivals.put, [(link, AbortRequests(request_ids=("a",)))]).start()
    assert server.wait_for_arrival(step) and aborted == [{"a"}]
    threading.Timer(0.01, step.cancel).start()
    assert not server.wait_for_arrival(step)
    assert not server.wait_for_arrival(step), "one that is done is not waited for"
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
            await until(lambda: bool(engine._requests.death))
            with pytest.raises(EngineDeadError, match=r"rank 0 is gone \(old age\)") as error:
                await engine.check_health()
            assert error.value.summary == "rank 0 has died"

    run(test)


def test_a_lost_rank_is_the_end_of_the_engine() -> None:
    async def test() -> None:
        async with mock_engine(FAILING | MORTAL) as engine:
            stream = await submit(engine, "bad", [14], endless())
            with pytest.raises(EngineDeadError, match="rank 0 was lost"):
                await read(stream)
            with pytest.raises(EngineDeadError, match=r"the engine has failed: .*rank 0"):
                await engine.check_health()
            assert await asyncio.to_thread(have_ended, [pid_of(engine)], 60.0)
            assert engine._keepers[0].process is not None
            assert engine._keepers[0].process.process.exit_code == 1

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
