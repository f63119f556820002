"""Which models are loaded when, without their processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.router.catalog import KnownModel
from inflight.entrypoints.router.loaded_models import LoadedModels, ModelState, ShuttingDownError, Slot
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import EngineError, ModelNotFoundError

A, B = KnownModel("a", "a"), KnownModel("b", "b")


class WithoutProcesses(LoadedModels):
    """A model is loaded when the test says so, or fails as the test says."""

    def __init__(self, most: int = 1) -> None:
        super().__init__(
            ServerSettings(models_dir="x", models_max=most, models_spare=False), EngineArgs(), lambda _: False
        )
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.error: Exception | None = None
        self.started: list[str] = []

    async def _start(self, slot: Slot) -> None:
        self.started.append(slot.known.name)
        await self.may_start.wait()
        if self.error is not None:
            raise self.error


def run(test: Callable[[WithoutProcesses], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(WithoutProcesses()), 60)

    asyncio.run(bounded())


def test_a_model_that_nobody_uses_makes_room() -> None:
    async def test(models: WithoutProcesses) -> None:
        models.may_start.clear()
        models.load(models.slot(A))
        waiting = asyncio.create_task(models.use(B).__aenter__())
        while not models.slot(B).num_waiting:
            await asyncio.sleep(0)
        models.may_start.set()
        assert (await waiting).known is B
        assert models.slot(A).state is ModelState.UNLOADED

    run(test)


def test_two_models_do_not_push_each_other_out() -> None:
    """The requests that have waited for a model begin before it has to go."""

    async def test(models: WithoutProcesses) -> None:
        async def ask(known: KnownModel) -> None:
            async with models.use(known):
                await asyncio.sleep(0)

        await asyncio.gather(*(ask(known) for known in (A, B, A, B, B, A)))
        assert models.started == ["a", "b"]

    run(test)


def test_a_model_that_is_being_unloaded_is_loaded_again() -> None:
    async def test(models: WithoutProcesses) -> None:
        async with models.use(A) as slot:
            models.begin_unloading(slot)
            models.load(slot)
            models.load(slot)
        while slot.state is not ModelState.LOADED:
            await asyncio.sleep(0)

    run(test)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("embedded null byte")])
def test_what_the_system_refuses_is_the_error_of_the_request(error: Exception) -> None:
    async def test(models: WithoutProcesses) -> None:
        models.error = error
        with pytest.raises(EngineError, match="model a could not be loaded"):
            await models.use(A).__aenter__()
        models.error = None
        assert (await models.use(A).__aenter__()).state is ModelState.LOADED

    run(test)


def test_nothing_loads_a_model_that_is_deleted() -> None:
    async def test(models: WithoutProcesses) -> None:
        models.may_start.clear()
        waiting = [asyncio.create_task(models.use(A).__aenter__()) for _ in range(2)]
        while models.slot(A).num_waiting < 2:
            await asyncio.sleep(0)
        deleting = models.unloaded(models.slot(A))
        models.may_start.set()
        slots = await asyncio.gather(*waiting)
        entered = asyncio.create_task(deleting.__aenter__())
        late = asyncio.create_task(models.use(A).__aenter__())
        while not models.slot(A).num_waiting:
            await asyncio.sleep(0)
        for slot in slots:
            slot.num_active -= 1
        models._changed.set()
        await entered
        assert models.slot(A).state is ModelState.UNLOADED
        with pytest.raises(ModelNotFoundError, match="is being deleted"):
            await late
        await deleting.__aexit__(None, None, None)
        assert (await models.use(A).__aenter__()).state is ModelState.LOADED

    run(test)


def test_who_waits_for_a_model_is_told_that_the_server_ends() -> None:
    async def test(models: WithoutProcesses) -> None:
        models.may_start.clear()
        loading = asyncio.create_task(models.use(A).__aenter__())
        while not models.started:
            await asyncio.sleep(0)
        for_room = asyncio.create_task(models.use(B).__aenter__())
        while models.slot(B).state is not ModelState.LOADING:
            await asyncio.sleep(0)
        await models.drain(0)
        for waiting in (loading, for_room):
            with pytest.raises(ShuttingDownError, match="the server is shutting down"):
                await waiting
        await models.close()

    run(test)


def test_a_process_that_ends_with_the_server_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def test(models: WithoutProcesses) -> None:
        models.may_start.clear()
        models.error = EngineError("the process has ended")
        models.load(models.slot(A))
        while not models.started:
            await asyncio.sleep(0)
        await models.drain(0)
        models.may_start.set()
        while models.slot(A).state is not ModelState.UNLOADED:
            await asyncio.sleep(0)
        assert isinstance(models.slot(A).failure, ShuttingDownError) and not caplog.records

    run(test)
