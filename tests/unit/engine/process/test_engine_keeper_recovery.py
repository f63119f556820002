"""`EngineKeeper` over processes that are played: recoveries, their tries and pauses, and when it gives up."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.engine.process.engine_process import EXIT_GIVEN_UP
from inflight.errors import EngineDeadError
from inflight.interface.statistics import FaultStatus
from tests.conformance.configs import engine_config
from tests.unit.engine.process.played_processes import PlayedFrontEnd, Scene, play
from tests.unit.engine.serving.event_loop import until


def test_a_process_that_never_was_ready_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its front ends know why it could not start."""

    async def test() -> None:
        scene = Scene(monkeypatch)
        scene.keeper.start()
        scene.processes[0].ends()
        assert await scene.gives_up() == "the engine's process is gone: process 0 ended"
        assert len(scene.processes) == 1
        late = PlayedFrontEnd()  # also those that come afterwards
        scene.keeper.add(late)
        assert [str(error) for error in late.errors] == ["the engine's process is gone: process 0 ended"]

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


def test_a_process_that_starts_again_has_a_cache_of_the_size_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures nothing: what it would find depends on what else is in memory at that moment."""

    async def test() -> None:
        scene = Scene(monkeypatch)
        scene.keeper._config = engine_config()
        scene.keeper.start()
        scene.processes[0].becomes_ready(num_blocks=123)
        await scene.looks()
        for number in (1, 2):
            scene.processes[number - 1].ends()
            (await scene.next_process(number)).becomes_ready(num_blocks=5)
            await scene.looks()
        assert scene.keeper._config.cache.num_blocks == 123
        assert [None if each is None else each.cache.num_blocks for each in scene.configs[:3]] == [None, 123, 123]
        await scene.keeper.close()

    play(test)


def test_the_last_reason_that_a_start_has_told_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, engine_recovery_timeout_sec=10.0)
        (await scene.started()).ends()
        for number in range(1, 4):
            process = await scene.next_process(number)
            process.failure = f"no memory, try {number}"
            process.ends()
        last = await scene.next_process(4)
        scene.now += 100.0
        await scene.looks()
        assert last.was_killed
        assert await scene.gives_up() == "the engine did not start again within 10 s: no memory, try 3"

    play(test)


def test_a_start_that_hangs_is_killed_and_tried_again_within_the_time_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, engine_recovery_timeout_sec=100.0)
        (await scene.started()).ends()
        second = await scene.next_process(1)
        scene.now += 49.0
        await scene.looks()
        assert not second.was_killed
        scene.now += 2.0  # half of the time has passed
        third = await scene.next_process(2)
        assert second.was_killed and second.is_closed
        scene.now += 45.0  # it gets all of the time that is left: perhaps the machine is slow
        await scene.looks()
        assert not third.was_killed
        third.becomes_ready()
        await scene.looks()
        assert not any(front_end.errors for front_end in scene.front_ends)
        assert scene.keeper.status.num_recoveries == {"engine_died": 1}
        await scene.keeper.close()

    play(test)


def test_a_start_as_slow_as_the_first_one_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scene = Scene(monkeypatch, engine_recovery_timeout_sec=100.0)
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
        scene = Scene(monkeypatch, max_recoveries=3, engine_recovery_timeout_sec=100.0)
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
        monkeypatch.setattr("inflight.processes.recovery_limits.time", times)
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
        scene = Scene(monkeypatch, max_recoveries=1, engine_recovery_timeout_sec=1e9)  # each pause moves the clock
        first = await scene.started()
        scene.errors = [error] * 10**6
        first.ends()
        await until(lambda: len(scene.errors) < 10**6 - 1)
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
        scene = Scene(monkeypatch, engine_recovery_timeout_sec=0.02)
        (await scene.started()).ends()
        await scene.next_process(1)
        scene.now += 0.03
        assert await scene.gives_up() == "the engine did not start again within 0.02 s: process 1 ended"
        assert scene.processes[1].was_killed and scene.processes[1].is_closed

    play(test)
