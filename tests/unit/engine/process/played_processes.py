"""Processes and front ends that are played, for tests of `EngineKeeper`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.process import engine_keeper
from inflight.engine.process.engine_keeper import EngineKeeper
from inflight.errors import EngineDeadError
from inflight.interface.statistics import FaultStatus
from inflight.processes.child_process import pause_seconds
from tests.unit.engine.serving.event_loop import run, until


class PlayedProcess:
    """Stands for an `EngineProcess`. The test calls `becomes_ready` and `ends`."""

    def __init__(self, number: int, *, is_spare: bool = False) -> None:
        self.number, self.is_spare = number, is_spare
        self.sockets: dict[int, str] = {}
        self.is_ready = self.has_ended = self.is_closed = self.was_killed = self.was_lost = False
        self.unconnected: list[int] = []
        self.recovery_times: tuple[float, ...] = ()
        self.faults: FaultStatus | None = None
        self.lone_request, self.failure, self.num_blocks = "", "", 0
        self.begun: tuple[Any, ...] | None = None
        self.connected: list[tuple[int, int]] = []
        self.num_checks = 0
        self.grace: float | None = None
        self.signals: list[int] = []
        self.news = asyncio.Event()
        self.process = SimpleNamespace(
            state=f"process {number} runs", exit_code=None, pid=1000 + number, send_signal=self.signals.append
        )

    def begin(
        self,
        front_ends: tuple[int, ...],
        past: FaultStatus,
        fault_time: float,
        guilty: tuple[str, ...],
        recovery_times: tuple[float, ...],
    ) -> None:
        assert self.begun is None, "it was begun twice"
        self.past_recoveries = recovery_times
        self.begun = tuple(front_ends), past, fault_time, guilty
        self.sockets = {each: f"socket {self.number}.{each}" for each in front_ends}

    def connect(self, number: int, num_deaths: int) -> str | None:
        self.connected.append((number, num_deaths))
        return None if self.has_ended else f"socket {self.number}.{number}"

    @property
    def state(self) -> str:
        return str(self.process.state)

    def check(self) -> None:
        assert not self.is_closed
        self.num_checks += 1

    async def wait_for_news(self, seconds: float) -> None:
        await asyncio.sleep(0)  # a look of the keeper lasts no time here
        self.news.clear()

    async def close(self, grace_seconds: float = 20.0) -> None:
        assert not self.is_closed, "it was closed twice"
        self.is_closed, self.grace = True, grace_seconds

    def take_unconnected(self) -> list[int]:
        taken, self.unconnected = self.unconnected, []
        return taken

    def kill(self, reason: str) -> None:
        self.was_killed = True
        self.signals.append(signal.SIGKILL)
        self.ends(-9)

    def becomes_ready(self, num_blocks: int = 0) -> None:
        self.is_ready, self.num_blocks = True, num_blocks

    def ends(self, exit_code: int = 1) -> None:
        self.has_ended = True
        self.was_lost = exit_code < 0 and not self.was_killed
        self.process.exit_code, self.process.state = exit_code, f"process {self.number} ended"


class PlayedFrontEnd:
    def __init__(self) -> None:
        self.sockets: list[object] = []
        self.errors: list[EngineDeadError] = []
        self.is_gone = False

    def put(self, engine_socket: object) -> bool:
        """False if the front end has ended (`is_gone`)."""
        self.sockets.append(engine_socket)
        return not self.is_gone

    def fail(self, error: EngineDeadError) -> None:
        self.errors.append(error)


class Scene:
    """A keeper, and the processes that it has started. `errors` are raised at the next starts of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nnodes: int = 1, **limits: Any) -> None:
        self.processes: list[PlayedProcess] = []
        self.errors: list[Exception] = []
        self.configs: list[Any] = []  # Any: a test may have made a stand-in
        self.now = 100.0
        monkeypatch.setattr(engine_keeper, "EngineProcess", self._new_process)
        self.pauses: list[float] = []
        monkeypatch.setattr(engine_keeper, "pause_seconds", self._pause)
        monkeypatch.setattr(engine_keeper, "time", SimpleNamespace(monotonic=lambda: self.now))
        config = SimpleNamespace(
            fault_tolerance=FaultToleranceConfig(**limits), parallel=SimpleNamespace(nnodes=nnodes, replicas=(0,))
        )
        self.keeper = EngineKeeper(cast("Any", None), cast("Any", config))
        self.front_ends = [PlayedFrontEnd() for _ in range(2)]
        for front_end in self.front_ends:
            self.keeper.add(cast("Any", front_end))

    def _new_process(self, _args: object, config: Any, *, is_spare: bool = False) -> PlayedProcess:
        if self.errors:
            raise self.errors.pop(0)
        self.configs.append(config)
        self.processes.append(PlayedProcess(len(self.processes), is_spare=is_spare))
        return self.processes[-1]

    def _pause(self, num_failed: int) -> float:
        """The pause lasts no real time, but time passes."""
        self.pauses.append(pause_seconds(num_failed))
        self.now += self.pauses[-1]
        return 0.0

    async def started(self) -> PlayedProcess:
        self.keeper.start()
        self.processes[0].becomes_ready()
        await self.looks()
        return self.processes[0]

    async def looks(self, count: int = 10) -> None:
        """Let the keeper look some times."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def next_process(self, number: int) -> PlayedProcess:
        await until(lambda: len(self.processes) > number)
        await self.looks()
        return self.processes[number]

    async def gives_up(self) -> str:
        with pytest.raises(EngineDeadError) as caught:
            await asyncio.wait_for(self.keeper.failed(), 300)
        for front_end in self.front_ends:
            assert front_end.errors == [caught.value]  # each front end is told, once
        await self.keeper.close()
        return str(caught.value)


def play(test: Callable[[], Awaitable[None]]) -> None:
    async def checked() -> None:
        await test()
        assert asyncio.all_tasks() <= {asyncio.current_task()}

    run(checked)
