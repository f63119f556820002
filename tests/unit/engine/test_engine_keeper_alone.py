"""`EngineKeeper` over processes that are played: whom it tells what, in which order, and when it gives up."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine import engine_keeper
from inflight.engine.engine_keeper import EngineKeeper
from inflight.engine.engine_process import EXIT_GIVEN_UP
from inflight.errors import EngineDeadError
from inflight.executor.process import pause_seconds
from inflight.interface.statistics import FaultStatus
from tests.unit.engine.test_async_llm import run, until


class PlayedProcess:
    """Stands for an `EngineProcess`. The test calls `becomes_ready` and `ends`."""

    def __init__(self, number: int, *, is_spare: bool = False) -> None:
        self.number, self.is_spare = number, is_spare
        self.sockets: dict[int, str] = {}
        self.is_ready = self.has_ended = self.is_closed = self.was_killed = self.was_lost = False
        self.unconnected: list[int] = []
        self.recovery_times: tuple[float, ...] = ()
        self.faults: FaultStatus | None = None
        self.suspect = ""
        self.begun: tuple[Any, ...] | None = None
        self.connected: list[tuple[int, int]] = []
        self.num_checks = 0
        self.grace: float | None = None
        self.signals: list[int] = []
        self._news = asyncio.Event()
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

    def check(self) -> None:
        assert not self.is_closed
        self.num_checks += 1

    async def wait_for_news(self, seconds: float) -> None:
        await asyncio.sleep(0)  # a look of the keeper lasts no time here
        self._news.clear()

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

    def becomes_ready(self) -> None:
        self.is_ready = True

    def ends(self, exit_code: int = 1) -> None:
        self.has_ended = True
        self.was_lost = exit_code < 0 and not self.was_killed
        self.process.exit_code, self.process.state = exit_code, f"process {self.number} ended"


class PlayedFrontEnd:
    def __init__(self) -> None:
        self.sockets: list[object] = []
        self.errors: list[EngineDeadError] = []

    def put(self, engine_socket: object) -> None:
        self.sockets.append(engine_socket)

    def fail(self, error: EngineDeadError) -> None:
        self.errors.append(error)


class Scene:
    """A keeper, and the processes that it has started. `errors` are raised at the next starts of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nnodes: int = 1, **limits: Any) -> None:
        self.processes: list[PlayedProcess] = []
        self.errors: list[Exception] = []
        self.now = 100.0
        monkeypatch.setattr(engine_keeper, "EngineProcess", self._new_process)
        self.pauses: list[float] = []
        monkeypatch.setattr(engine_keeper, "pause_seconds", self._pause)
        monkeypatch.setattr(engine_keeper, "time", SimpleNamespace(monotonic=lambda: self.now))
        config = SimpleNamespace(
            fault_tolerance=FaultToleranceConfig(**limits), parallel=SimpleNamespace(nnodes=nnodes)
        )
        self.keeper = EngineKeeper(cast("Any", None), cast("Any", config))
        self.front_ends = [PlayedFrontEnd() for _ in range(2)]
        for front_end in self.front_ends:
            self.keeper.add(cast("Any", front_end))

    def _new_process(self, _args: object, _config: object, *, is_spare: bool = False) -> PlayedProcess:
        if self.errors:
            raise self.errors.pop(0)
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
        await until(lambda: len(self.processes) > number, 5)
        await self.looks()
        return self.processes[number]

    async def gives_up(self) -> str:
        with pytest.raises(EngineDeadError) as caught:
            await asyncio.wait_for(self.keeper.failed(), 5)
        for front_end in self.front_ends:
            assert front_end.errors == [caught.value]  # each front end is told, once
        await self.keeper.close()
        return str(caught.value)


def play(test: Callable[[], Awaitable[None]]) -> None:
    async def checked() -> None:
        await test()
        assert asyncio.all_tasks() <= {asyncio.current_task()}

    run(checked)


def test_every_front_end_gets_a_socket_to_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch)
        assert (scene.keeper.process, scene.keeper.has_ended) == (None, False)
        first = await scene.started()
        assert scene.keeper.process is first and scene.keeper.state == "process 0 runs"
        assert first.begun == ((0, 1), FaultStatus(), 0.0, ())
        late = PlayedFrontEnd()
        assert scene.keeper.add(cast("Any", late)) == 2
        assert (first.connected, late.sockets) == ([(2, 0)], ["socket 0.2"])
        scene.now = 150.0
        first.faults = FaultStatus(num_recoveries={"rank_died": 2, "engine_died": 4}, epoch=3)
        first.ends()
        second = await scene.next_process(1)
        assert first.grace == 0.0  # it has ended already
        assert second.begun is not None
        numbers, past, fault_time, guilty = second.begun
        assert (numbers, fault_time, guilty) == ((0, 1, 2), 150.0, ())
        assert (past.num_recoveries, past.epoch) == ({"rank_died": 2, "engine_died": 5}, 3)
        assert past.last_cause == "the engine's process is gone: process 0 ended"
        assert scene.keeper.status == past
        assert [each.sockets for each in (*scene.front_ends, late)] == [
            [f"socket 0.{number}", f"socket 1.{number}"] for number in range(3)
        ]
        assert second.sockets == {}  # the front ends own them
        second.becomes_ready()
        await scene.looks()
        num_checks = second.num_checks
        await scene.looks()
        assert second.num_checks > num_checks  # it is looked at as long as it runs
        await scene.keeper.close(7.0)
        assert second.grace == 7.0
        await scene.keeper.close()  # idempotent
        assert (scene.keeper.process, scene.keeper.state) == (None, "process 1 runs")

    play(test)


def test_the_death_of_a_front_end_is_counted_and_its_number_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch)
        first = await scene.started()
        scene.keeper.remove(0)
        assert scene.keeper.status.num_recoveries == {"front_end_died": 1}
        assert scene.keeper.status.last_cause == "front end 0 has died"
        new = PlayedFrontEnd()
        assert scene.keeper.add(cast("Any", new)) == 2
        assert first.connected == [(2, 1)]  # the engine learns how many have died
        first.ends()
        assert scene.keeper.has_ended
        late = PlayedFrontEnd()
        assert scene.keeper.add(cast("Any", late)) == 3
        assert late.sockets == []  # the process is gone, which the keeper does not know yet
        second = await scene.next_process(1)
        assert second.begun is not None and second.begun[0] == (1, 2, 3)
        assert scene.keeper.status.num_recoveries == {"front_end_died": 1, "engine_died": 1}
        assert late.sockets == ["socket 1.3"] and len(scene.front_ends[0].sockets) == 1
        await scene.keeper.close()

    play(test)


def test_requests_that_ran_alone_in_lost_processes_are_told_to_all_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch)
        process = await scene.started()
        guilty = []
        for number, suspect in enumerate(("a", "", "b"), 1):
            process.suspect = suspect
            process.ends()
            process = await scene.next_process(number)
            process.becomes_ready()
            await scene.looks()
            assert process.begun is not None
            guilty.append(process.begun[3])
        assert guilty == [("a",), ("a",), ("a", "b")]
        await scene.keeper.close()

    play(test)


def test_a_process_that_never_was_ready_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its front ends know why it could not start."""

    async def test() -> None:
        scene = Scene(monkeypatch)
        scene.keeper.start()
        scene.processes[0].ends()
        assert await scene.gives_up() == "the engine's process is gone: process 0 ended"
        assert len(scene.processes) == 1

    play(test)


def test_a_process_that_ends_before_it_is_ready_after_a_recovery_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is one recovery, with pauses between the tries."""

    async def test() -> None:
        scene = Scene(monkeypatch, max_recoveries=1)
        (await scene.started()).ends()
        for number in range(1, 8):
            process = await scene.next_process(number)
            assert scene.pauses == [0.2, 0.5, 1.0, 2.0, 5.0, 5.0][: number - 1]
            process.ends()
        last = await scene.next_process(8)
        assert last.begun is not None
        assert last.begun[1].num_recoveries == {"engine_died": 1}
        assert last.begun[2] == 100.0  # the fault began when the first process was lost
        last.becomes_ready()
        await scene.looks()
        last.ends()
        assert "process 8 ended; 1 recoveries within one hour are allowed" in await scene.gives_up()

    play(test)


def test_a_start_that_hangs_is_killed_and_tried_again_within_the_time_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, engine_recovery_timeout_seconds=100.0)
        (await scene.started()).ends()
        second = await scene.next_process(1)
        scene.now += 49.0
        await scene.looks()
        assert not second.was_killed
        scene.now += 2.0  # half of the time has passed
        third = await scene.next_process(2)
        assert second.was_killed and second.is_closed and not third.was_killed
        third.becomes_ready()
        await scene.looks()
        assert not any(front_end.errors for front_end in scene.front_ends)
        assert scene.keeper.status.num_recoveries == {"engine_died": 1}
        await scene.keeper.close()

    play(test)


def test_a_start_as_slow_as_the_first_one_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, engine_recovery_timeout_seconds=100.0)
        scene.keeper.start()
        await scene.looks()
        scene.now += 48.0
        scene.processes[0].becomes_ready()
        await scene.looks()
        scene.processes[0].ends()
        second = await scene.next_process(1)
        scene.now += 90.0
        await scene.looks()
        assert not second.was_killed
        second.becomes_ready()
        await scene.looks()
        assert scene.keeper.process is cast("Any", second)
        await scene.keeper.close()

    play(test)


def test_a_first_start_that_hangs_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch)
        scene.keeper.start()
        await scene.looks()
        scene.processes[0].kill("it has not answered")  # as its pings do
        second = await scene.next_process(1)
        second.becomes_ready()
        await scene.looks()
        assert scene.keeper.process is cast("Any", second)
        assert not any(front_end.errors for front_end in scene.front_ends)
        await scene.keeper.close()

    play(test)


def test_a_start_that_something_else_ends_late_is_another_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has new time, and counts; but one that ends at once does not count, as one for which there is no memory."""

    async def test() -> None:
        scene = Scene(monkeypatch, max_recoveries=3, engine_recovery_timeout_seconds=100.0)
        (await scene.started()).ends()
        for number in (1, 2):
            process = await scene.next_process(number)
            scene.now += 45.0
            process.ends(-9)
        for number in (3, 4, 5):
            process = await scene.next_process(number)
            scene.now += 1.0
            process.ends(-9)
        last = await scene.next_process(6)  # more than 100 s after the first fault
        assert scene.keeper.status.num_recoveries == {"engine_died": 3}
        scene.now += 45.0
        last.ends(-9)
        assert "3 recoveries within one hour are allowed" in await scene.gives_up()

    play(test)


def test_a_socket_that_did_not_arrive_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch)
        process = await scene.started()
        process.unconnected = [1, 7]  # front end 7 has died meanwhile
        await scene.looks()
        assert process.connected == [(1, 0)]
        assert scene.front_ends[1].sockets == ["socket 0.1", "socket 0.1"]
        await scene.keeper.close()

    play(test)


def test_counts_of_recoveries_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost engine core had not heard of the newest deaths of front ends."""

    async def test() -> None:
        scene = Scene(monkeypatch)
        process = await scene.started()
        for number in (0, 1):
            scene.keeper.remove(number)
        process.faults = FaultStatus(num_recoveries={"rank_died": 2, "front_end_died": 1}, epoch=2)
        process.recovery_times = 3.0, 5.0
        process.ends()
        second = await scene.next_process(1)
        expected = {"rank_died": 2, "front_end_died": 2, "engine_died": 1}
        assert scene.keeper.status.num_recoveries == expected
        assert second.past_recoveries == (3.0, 5.0)  # the limit for ranks counts on
        second.ends()  # before it has told anything
        third = await scene.next_process(2)
        assert scene.keeper.status.num_recoveries == expected
        assert third.past_recoveries == (3.0, 5.0)
        await scene.keeper.close()

    play(test)


def test_after_an_hour_there_may_be_as_many_recoveries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, max_recoveries=1)
        times = SimpleNamespace(monotonic=lambda: scene.now)
        monkeypatch.setattr("inflight.executor.recovery.time", times)
        process = await scene.started()
        for number in (1, 2, 3):
            process.ends()
            process = await scene.next_process(number)
            process.becomes_ready()
            await scene.looks()
            scene.now += 3601
        assert not any(front_end.errors for front_end in scene.front_ends)
        await scene.keeper.close()

    play(test)


@pytest.mark.parametrize(
    ("limits", "exit_code", "words"),
    [
        ({"enabled": False}, 1, "the engine's process is gone: process 0 ended"),
        ({}, EXIT_GIVEN_UP, "process 0 ended; its ranks had used all 10 recoveries"),
        ({"max_recoveries": 0}, 1, "process 0 ended; 0 recoveries within one hour are allowed"),
    ],
)
def test_when_the_engine_is_given_up(
    limits: dict[str, Any], exit_code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, **limits)
        (await scene.started()).ends(exit_code)
        assert words in await scene.gives_up()
        assert len(scene.processes) == 1

    play(test)


@pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, "fork failed"), EngineDeadError("it ended at once")])
def test_if_no_process_can_be_started_the_keeper_tries_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile a front end may come. This is one recovery."""

    async def test() -> None:
        scene = Scene(monkeypatch, max_recoveries=1)
        first = await scene.started()
        scene.errors = [error] * 10**6
        first.ends()
        await until(lambda: len(scene.errors) < 10**6 - 1, 5)
        assert scene.keeper.process is None and scene.keeper.state == "process 0 ended"
        late = PlayedFrontEnd()
        scene.keeper.add(cast("Any", late))
        scene.errors.clear()
        second = await scene.next_process(1)
        assert second.begun is not None and second.begun[0] == (0, 1, 2)
        assert late.sockets == ["socket 1.2"]
        assert scene.keeper.status.num_recoveries == {"engine_died": 1}
        await scene.keeper.close()

    play(test)


def test_a_recovery_may_not_take_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that still loads its model is killed."""

    async def test() -> None:
        scene = Scene(monkeypatch, engine_recovery_timeout_seconds=0.02)
        (await scene.started()).ends()
        await scene.next_process(1)
        scene.now += 0.03
        assert await scene.gives_up() == "the engine did not start again within 0.02 s"
        assert scene.processes[1].was_killed and scene.processes[1].is_closed

    play(test)


# -- the spare process -----------------------------------------------------------------------------------------------


def test_a_spare_process_waits_some_seconds_and_takes_the_place_of_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, spare_workers=1)
        first = await scene.started()
        assert len(scene.processes) == 1  # not yet: it would slow the first requests down
        scene.now += engine_keeper.SPARE_SECONDS + 0.1
        spare = await scene.next_process(1)
        assert spare.is_spare and spare.begun is None and spare.num_checks > 0
        assert len(scene.processes) == 2  # one is enough

        spare.ends()  # then there is another one, but not at once
        await scene.looks()
        assert spare.is_closed and len(scene.processes) == 2
        scene.now += engine_keeper.SPARE_SECONDS + 0.1
        other = await scene.next_process(2)

        first.ends()
        await until(lambda: other.begun is not None, 5)
        assert scene.keeper.process is cast("Any", other)
        await scene.looks()
        assert len(scene.processes) == 3 and other.signals == []
        scene.now += 50
        await scene.looks()
        assert len(scene.processes) == 3  # while the engine starts, nothing else does
        other.becomes_ready()
        await scene.looks()
        assert len(scene.processes) == 3
        scene.now += engine_keeper.SPARE_SECONDS + 0.1
        last = await scene.next_process(3)
        assert last.is_spare
        await scene.keeper.close(5.0)
        assert last.signals == [signal.SIGKILL] and last.is_closed  # it has nothing to lose
        assert other.signals == [] and other.grace == 5.0

    play(test)


def test_a_spare_process_that_cannot_be_started_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, spare_workers=1)
        await scene.started()
        scene.errors = [OSError("no memory"), EngineDeadError("it ended at once")]
        for num_left in (1, 0):
            scene.now += engine_keeper.SPARE_SECONDS + 0.1
            await scene.looks()
            assert len(scene.errors) == num_left
        scene.now += engine_keeper.SPARE_SECONDS + 0.1
        assert (await scene.next_process(1)).is_spare
        await scene.keeper.close()

    play(test)


@pytest.mark.parametrize(
    ("limits", "nnodes"),
    [({"spare_workers": 0}, 1), ({"spare_workers": 1, "enabled": False}, 1), ({"spare_workers": 1}, 2)],
)
def test_who_gets_no_spare_process(limits: dict[str, Any], nnodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, nnodes, **limits)
        await scene.started()
        scene.now += 1000
        await scene.looks()
        assert len(scene.processes) == 1
        await scene.keeper.close()

    play(test)
