"""`EngineKeeper` over processes that are played: whom it tells what, in which order, and its spare process."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.engine.process import engine_keeper
from inflight.engine.process.engine_process import EngineProcess
from inflight.errors import EngineDeadError
from inflight.interface.statistics import FaultStatus
from tests.unit.engine.process.played_processes import PlayedFrontEnd, PlayedProcess, Scene, play
from tests.unit.engine.serving.event_loop import until


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
        for number, lone_request in enumerate(("a", "", "b"), 1):
            process.lone_request = lone_request
            process.ends()
            process = await scene.next_process(number)
            process.becomes_ready()
            await scene.looks()
            assert process.begun is not None
            guilty.append(process.begun[3])
        assert guilty == [("a",), ("a",), ("a", "b")]
        await scene.keeper.close()

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
        await until(lambda: other.begun is not None)
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


@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("is_ready", [False, True])
def test_a_keeper_that_is_closed_just_when_its_process_has_news_ends(
    monkeypatch: pytest.MonkeyPatch, num_turns: int, is_ready: bool
) -> None:
    """The loop turns a few times between the news, that the process is ready or has ended, and the call of `close`. In one of
    these turns a cancelled `asyncio.wait_for` of Python 3.11 goes on, so the keeper would have waited for itself for ever."""

    async def wait_for_news(process: PlayedProcess, seconds: float) -> None:
        await EngineProcess.wait_for_news(cast("Any", SimpleNamespace(_has_news=process.news)), 1000.0)

    async def test() -> None:
        scene = Scene(monkeypatch)
        monkeypatch.setattr(PlayedProcess, "wait_for_news", wait_for_news)
        scene.keeper.start()
        process = scene.processes[0]
        if not is_ready:
            process.becomes_ready()
            process.news.set()
        await scene.looks()
        process.becomes_ready() if is_ready else process.ends(-9)
        process.news.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(300):
            await scene.keeper.close()
        assert scene.keeper.process is None
        assert all(each.is_closed for each in scene.processes)

    play(test)
