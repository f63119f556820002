"""How often front ends that die are replaced. The e2e tests of several front ends have the rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import Shutdown
from inflight.entrypoints.serve.supervisor import Supervisor
from inflight.executor.recovery import RecoveryLimits


class FrontEnd:
    """Its process has died, or it has said that it cannot start, or it runs."""

    def __init__(self, number: int, *, has_ended: bool, has_died: bool) -> None:
        loop = asyncio.get_running_loop()
        self.number, self.index, self.has_died = number, number % 2, has_died
        self.ended: asyncio.Future[None] = loop.create_future()
        self.ready: asyncio.Future[str] = loop.create_future()
        if has_ended:
            self.ended.set_result(None)
        self.num_looks = 0
        self.process = SimpleNamespace(state="it is dead", kill_if_stopped=self.look)
        self.is_closed = False

    def look(self) -> None:
        self.num_looks += 1

    def close(self) -> None:
        self.is_closed = True


class Keeper:
    def __init__(self) -> None:
        self.removed: list[int] = []
        self.num_added = 2

    def add(self, front_end: FrontEnd) -> int:
        self.num_added += 1
        return self.num_added - 1

    def remove(self, number: int) -> None:
        self.removed.append(number)

    async def failed(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(("has_died", "num_replaced"), [(True, 3), (False, 0)])
def test_one_that_dies_again_and_again_is_given_up(has_died: bool, num_replaced: int) -> None:
    """One that reports a failure is not replaced. Those that die are replaced `max_recoveries` times."""

    async def test() -> None:
        listener: Any = None  # it is used by front ends only
        supervisor: Any = Supervisor(ServerSettings(api_server_count=2), EngineArgs(), listener, Shutdown(1.0), "")
        supervisor._keeper = keeper = Keeper()
        supervisor._limits = RecoveryLimits(FaultToleranceConfig(max_recoveries=3))
        started: list[FrontEnd] = []

        def start(index: int, *, is_replacement: bool) -> FrontEnd:
            assert (index, is_replacement) == (1, True)
            assert len(started) < 5, "it is replaced for ever"
            started.append(FrontEnd(1, has_ended=True, has_died=True))
            return started[-1]

        supervisor._start_front_end = start
        living, dead = FrontEnd(0, has_ended=False, has_died=False), FrontEnd(1, has_ended=True, has_died=has_died)
        supervisor.front_ends = [living, dead]
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await supervisor._keep_front_ends(begun)
        assert len(started) == num_replaced and not living.is_closed
        assert keeper.removed == [1, 2, 3][:num_replaced]
        assert [each.is_closed for each in (dead, *started)] == [True] * num_replaced + [False]
        assert living.num_looks == num_replaced + 1, "it may hang"

    asyncio.run(asyncio.wait_for(test(), 10.0))


def test_none_is_replaced_once_the_shutdown_has_begun() -> None:
    async def test() -> None:
        listener: Any = None
        supervisor: Any = Supervisor(ServerSettings(api_server_count=1), EngineArgs(), listener, Shutdown(1.0), "")
        supervisor._keeper = Keeper()
        supervisor._limits = RecoveryLimits(FaultToleranceConfig())
        supervisor.front_ends = [FrontEnd(0, has_ended=True, has_died=True)]
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begun.set_result(None)
        await supervisor._keep_front_ends(begun)
        assert not supervisor.front_ends[0].is_closed

    asyncio.run(asyncio.wait_for(test(), 10.0))
