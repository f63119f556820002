"""An `AsyncLLM` that nobody closes, or that is used where it does not belong: nothing is left, and no call waits for ever."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.engine.process.engine_keeper import EngineKeeper
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.errors import EngineClosedError, EngineError
from inflight.sampling_params import SamplingParams
from tests.support.processes import children, have_ended
from tests.support.waits import wait_until
from tests.unit.engine.serving.event_loop import run
from tests.unit.engine.serving.serving import mock_args, mock_engine

# a loop that has ended cannot close its streams, so Python closes their sockets, and says so
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning", "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def _nothing_is_left_for_other_tests() -> Iterator[None]:
    yield
    gc.collect()


def num_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("inflight-")}


async def made() -> AsyncLLM:
    engine = await AsyncLLM.from_args(mock_args())
    assert [output async for output in engine.generate("x", SHORT)]
    return engine


def calls(engine: AsyncLLM) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
    async def generate() -> None:
        async for _ in engine.generate("x", SHORT):
            pass

    async def check() -> None:
        engine.check_admission()

    async def submit() -> None:
        engine.submit_all([])

    return {
        "generate": generate,
        "check_admission": check,
        "submit_all": submit,
        "process": lambda: engine.process("a", "x", SHORT),
        "encode": lambda: engine.encode("x"),
        "abort": lambda: engine.abort("a"),
        "drain": lambda: engine.drain(1.0),
        "reset_prefix_cache": engine.reset_prefix_cache,
        "check_health": engine.check_health,
        "check_ready": engine.check_ready,
    }


def refused(engine: AsyncLLM, kind: type[EngineError]) -> None:
    for name, call in calls(engine).items():
        with pytest.raises(EngineError) as caught:
            asyncio.run(asyncio.wait_for(call(), 300))
        assert type(caught.value) is kind, name


# -- nobody refers to it any more ------------------------------------------------------------------------------------


def test_it_ends_while_its_loop_runs() -> None:
    async def test() -> None:
        before = set(children(os.getpid()))
        engine: AsyncLLM | None = await made()
        assert engine is not None
        stream = engine.submit(await engine.process("a", "x", SamplingParams(max_tokens=500)), timeout=3600)
        new = set(children(os.getpid())) - before
        assert new
        engine = None
        gc.collect()
        del stream
        gc.collect()
        async with asyncio.timeout(300):
            while not have_ended(new, 0.0) or asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0.01)

    threads, descriptors = own_threads(), num_descriptors()
    run(test)
    wait_until(lambda: own_threads() <= threads)
    assert num_descriptors() <= descriptors


@pytest.mark.parametrize("is_closed", [True, False])
def test_it_ends_when_its_loop_runs_no_more(is_closed: bool) -> None:
    threads, descriptors, before = own_threads(), num_descriptors(), set(children(os.getpid()))
    loop = asyncio.new_event_loop()
    engine: AsyncLLM | None = loop.run_until_complete(made())
    new = set(children(os.getpid())) - before
    if is_closed:
        loop.run_until_complete(cancelled_tasks())
        loop.close()
    engine = None
    gc.collect()
    assert engine is None and new and have_ended(new)
    if not is_closed:
        loop.run_until_complete(asyncio.sleep(0.2))  # the loop closes what it knows, and starts no process again
        loop.run_until_complete(cancelled_tasks())
        loop.close()
    assert set(children(os.getpid())) <= before
    wait_until(lambda: own_threads() <= threads)
    wait_until(lambda: num_descriptors() <= descriptors)


async def cancelled_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_close_that_is_cancelled_leaves_no_process() -> None:
    """A second Ctrl-C in `asyncio.run` cancels all tasks."""

    async def begin() -> set[int]:
        before = set(children(os.getpid()))
        engine = await made()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not closing.done()
        return set(children(os.getpid())) - before

    new = asyncio.run(begin())
    assert new and have_ended(new)


# -- another event loop ----------------------------------------------------------------------------------------------


def test_a_loop_that_has_ended_is_named_and_close_works() -> None:
    before = set(children(os.getpid()))
    engine = asyncio.run(made())
    new = set(children(os.getpid())) - before
    refused(engine, EngineClosedError)
    asyncio.run(engine.close())
    assert new and have_ended(new)
    asyncio.run(engine.close())
    refused(engine, EngineClosedError)


def test_a_loop_of_another_thread_is_named_and_close_works() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        engine = asyncio.run_coroutine_threadsafe(made(), loop).result(300)
        refused(engine, EngineError)
        with pytest.raises(EngineError):
            engine.check_admission()  # no loop runs here
        asyncio.run_coroutine_threadsafe(engine.check_health(), loop).result(300)
        asyncio.run(engine.close())
        [keeper] = engine._keepers
        assert isinstance(keeper, EngineKeeper) and keeper.process is None
        with pytest.raises(EngineClosedError):
            asyncio.run_coroutine_threadsafe(engine.check_health(), loop).result(300)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# -- a forked process ------------------------------------------------------------------------------------------------


def test_a_forked_process_is_refused_and_the_parent_goes_on() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            truth = [output async for output in engine.generate("x", SHORT)][-1].outputs[0].token_ids
            if (child := os.fork()) == 0:
                try:
                    refused(engine, EngineClosedError)
                    asyncio.run(engine.close())
                    del engine
                    gc.collect()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
            found = [output async for output in engine.generate("x", SHORT)][-1].outputs[0].token_ids
            assert found == truth

    run(test)
