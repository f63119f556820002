"""Which front ends are replaced, how often, and after which pauses. The e2e tests of several front ends have the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.entrypoints.serve import supervisor
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, Shutdown
from inflight.entrypoints.serve.supervisor import Supervisor
from inflight.processes.child_process import pause_seconds
from inflight.processes.recovery_limits import RecoveryLimits


class FrontEnd:
    """Its process has died, or it has said that it cannot start, or it runs."""

    def __init__(
        self, number: int, *, has_ended: bool = False, has_died: bool = False, was_ready: bool = False
    ) -> None:
        loop = asyncio.get_running_loop()
        self.is_replacement = False
        self.number, self.index, self.has_died = number, number % 2, has_died
        self.ended: asyncio.Future[None] = loop.create_future()
        self.ready: asyncio.Future[str] = loop.create_future()
        if was_ready:
            self.ready.set_result("a model")
        if has_ended:
            self.ended.set_result(None)
        self.num_looks = 0
        self.process = SimpleNamespace(state="it is dead", kill_if_stopped=self.look)
        self.is_closed = False

    def look(self) -> None:
        self.num_looks += 1

    def close(self) -> None:
        self.is_closed = True

    def send(self, order: bytes) -> None:
        pass


class Keeper:
    def __init__(self) -> None:
        self.removed: list[int] = []
        self.closed: list[tuple[float, ...]] = []
        self.num_added = 2

    def add(self, front_end: FrontEnd) -> int:
        self.num_added += 1
        return self.num_added - 1

    def remove(self, number: int) -> None:
        self.removed.append(number)

    async def failed(self) -> None:
        await asyncio.Event().wait()

    async def close(self, *grace_seconds: float) -> None:
        self.closed.append(grace_seconds)


class Scene:
    """A supervisor of two front ends, with an engine that runs. Each front end that is started dies at once, or is ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_deaths: int, **limits: Any) -> None:
        listener: Any = None  # it is used by front ends only
        self.shutdown = Shutdown(1.0)
        self.supervisor: Any = Supervisor(ServerSettings(api_server_count=2), EngineArgs(), listener, self.shutdown, "")
        self.keeper = Keeper()
        self.supervisor._keepers = [self.keeper]
        self.supervisor._limits = RecoveryLimits(FaultToleranceConfig(**limits))
        self.supervisor._is_configured.set_result(None)
        self.supervisor._run_engine = self._run_engine
        self.supervisor._start_front_end = self._start
        self.errors: list[OSError] = []
        self.started: list[FrontEnd] = []
        self.pauses: list[float] = []
        self._num_deaths = num_deaths
        self.num_awaited = 1  # when so many are ready again, the scene ends
        monkeypatch.setattr(supervisor, "pause_seconds", self._pause)

    async def _run_engine(self, clock: object) -> None:
        await asyncio.Event().wait()

    def _pause(self, num_failed: int) -> float:
        self.pauses.append(pause_seconds(num_failed))
        return 0.0

    def _start(self, index: int, *, is_replacement: bool) -> FrontEnd:
        assert is_replacement
        if self.errors:
            raise self.errors.pop()
        assert len(self.started) < 30, "it is replaced for ever"
        dies = len(self.started) < self._num_deaths
        self.started.append(FrontEnd(index, has_ended=dies, has_died=dies))
        self.started[-1].is_replacement = True
        if not dies:
            self.started[-1].ready.set_result("a model")
            self.num_awaited -= 1
            if not self.num_awaited:
                asyncio.get_running_loop().call_soon(self.shutdown.begun.set)
        return self.started[-1]

    async def serve(self, *front_ends: FrontEnd) -> None:
        self.supervisor.front_ends = list(front_ends)
        await self.supervisor.serve(None)


def play(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))


def test_one_that_says_why_it_cannot_start_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, 0)
        await scene.serve(FrontEnd(0), FrontEnd(1, has_ended=True))
        assert not scene.started and not scene.keeper.removed

    play(test)


def test_one_that_dies_before_it_is_ready_again_is_the_same_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts once, and the tries follow more and more slowly."""

    async def test() -> None:
        scene = Scene(monkeypatch, 7, max_recoveries=1)
        living, dead = FrontEnd(0), FrontEnd(1, has_ended=True, has_died=True, was_ready=True)
        await scene.serve(living, dead)
        assert len(scene.started) == 8 and not living.is_closed
        assert scene.pauses == [0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0]
        assert scene.keeper.removed == [1, 2, 3, 4, 5, 6, 7, 8]
        assert all(each.is_closed for each in (dead, *scene.started[:-1])) and not scene.started[-1].is_closed
        assert len(scene.supervisor._limits.times) == 1

    play(test)


def test_one_that_dies_for_as_long_as_a_recovery_may_take_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, 10**6, engine_recovery_timeout_sec=100.0)
        now = 0.0

        def monotonic() -> float:
            nonlocal now
            now += 10.0
            return now

        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=monotonic))
        await scene.serve(FrontEnd(0), FrontEnd(1, has_ended=True, has_died=True))
        assert 5 <= len(scene.started) <= 12

    play(test)


def test_each_front_end_that_was_ready_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, 0, max_recoveries=0)
        await scene.serve(FrontEnd(0), FrontEnd(1, has_ended=True, has_died=True, was_ready=True))
        assert not scene.started

    play(test)


def test_two_that_die_at_once_are_both_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, 1)  # the first replacement dies, too
        scene.num_awaited = 2
        dead = [FrontEnd(index, has_ended=True, has_died=True, was_ready=True) for index in (0, 1)]
        await scene.serve(*dead)
        assert [each.index for each in scene.started] == [0, 1, 0]
        assert [each.index for each in scene.supervisor.front_ends] == [0, 1]
        assert all(each.is_closed for each in dead) and len(scene.supervisor._limits.times) == 2

    play(test)


def test_one_that_cannot_be_started_at_once_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, 0, max_recoveries=1)
        scene.errors = [OSError("no memory")] * 6
        dead = FrontEnd(1, has_ended=True, has_died=True, was_ready=True)
        await scene.serve(FrontEnd(0), dead)
        assert len(scene.started) == 1 and dead.is_closed
        assert scene.pauses == [0.2, 0.5, 1.0, 2.0, 5.0, 5.0]

    play(test)


def test_the_death_of_one_that_was_ready_again_is_another_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, 0)
        # the time in which an earlier one had to be replaced is over
        scene.supervisor._faults[1] = supervisor._Fault(0.0)
        await scene.serve(FrontEnd(0), FrontEnd(1, has_ended=True, has_died=True, was_ready=True))
        assert len(scene.started) == len(scene.supervisor._limits.times) == 1
        assert scene.pauses == []

    play(test)


def test_none_is_replaced_once_the_shutdown_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, 0)
        scene.shutdown.begun.set()
        await scene.serve(FrontEnd(0, has_ended=True, has_died=True), FrontEnd(1))
        assert not scene.started and not scene.supervisor.front_ends[0].is_closed

    play(test)


def test_a_stopped_front_end_is_looked_for_from_the_start_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(supervisor, "STOPPED_LOOK_SECONDS", 0.001)
        scene = Scene(monkeypatch, 0)
        living = FrontEnd(0)
        scene.supervisor._start_front_end = lambda index: living if index == 0 else FrontEnd(1, has_ended=True)
        scene.supervisor.start_front_ends()
        while living.num_looks < 5:  # the engine has not even begun to start
            await asyncio.sleep(0)
        assert scene.supervisor.front_ends[1].num_looks == 0
        scene.supervisor._looking.cancel()

    play(test)


@pytest.mark.parametrize(("is_cut", "grace"), [(False, ()), (True, (CUT_SECONDS,))])
def test_an_engine_has_less_time_to_end_after_a_cut(
    monkeypatch: pytest.MonkeyPatch, is_cut: bool, grace: tuple[float, ...]
) -> None:
    async def test() -> None:
        monkeypatch.setattr(supervisor, "stop_processes", lambda processes, seconds: None)
        scene = Scene(monkeypatch, 0)
        scene.supervisor._listener = SimpleNamespace(socket=SimpleNamespace(close=lambda: None))
        scene.supervisor.front_ends = [FrontEnd(0, has_ended=True)]
        if is_cut:
            scene.shutdown.cut.set()
        await scene.supervisor.end()
        assert scene.keeper.closed == [grace]

    play(test)
