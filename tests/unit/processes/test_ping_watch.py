"""When a rank that does not answer is lost, and when it is only slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from inflight.processes.child_process import MAX_STOPPED_LOOKS
from inflight.processes.ping_watch import FROZEN_TICKS, PING_SECONDS, REMOTE_TICKS, PingWatch


@dataclass
class Process:
    """What the watch asks of a process."""

    is_stopped: bool = False
    may_run: bool = True
    num_looks: int = 0
    pid: int = 7
    state: str = "process 7 is stopped by a signal"

    def stays_stopped(self) -> bool:
        self.num_looks += self.is_stopped
        return self.num_looks == MAX_STOPPED_LOOKS


def ticks_until_lost(process: Any, *, answers: int = 0, most: int = 200) -> int | None:
    """After how many pings without an answer the rank is lost. It answers the first `answers` of them."""
    lost: list[str] = []
    watch = PingWatch(lambda rank: None, lambda rank, reason: lost.append(reason))
    for tick in range(most):
        if lost:
            return tick - 1 - answers
        watch.tick(0, process)
        if tick < answers:
            watch.heard(0)
    return None


@pytest.mark.parametrize("answers", [0, 1])
def test_a_stopped_process_is_lost_at_the_third_look(answers: int) -> None:
    """Also if it has answered until then, because a signal may come at any time."""
    assert ticks_until_lost(Process(is_stopped=True), answers=answers) == MAX_STOPPED_LOOKS - 1 - answers


def test_a_process_that_waits_for_cores_is_not_lost() -> None:
    assert ticks_until_lost(Process(may_run=True)) is None


def test_a_process_whose_threads_all_sleep_is_lost() -> None:
    assert ticks_until_lost(Process(may_run=False)) == FROZEN_TICKS - 1


def test_a_process_that_now_and_then_can_run_is_not_lost() -> None:
    class Slow(Process):
        num_may_run_looks = 0

        def __getattribute__(self, name: str) -> Any:
            if name != "may_run":
                return super().__getattribute__(name)
            Slow.num_may_run_looks += 1
            return Slow.num_may_run_looks % 5 == 0

    assert ticks_until_lost(Slow()) is None


def test_a_rank_of_another_machine_is_lost_after_ten_seconds() -> None:
    assert ticks_until_lost(None) == REMOTE_TICKS


def test_an_answer_begins_all_counts_anew() -> None:
    """Also the count of the looks at which no thread could run."""
    asked: list[int] = []
    lost: list[tuple[int, str]] = []
    watch = PingWatch(asked.append, lambda rank, reason: lost.append((rank, reason)))
    asleep: Any = Process(may_run=False)
    for _ in range(2):
        for _ in range(FROZEN_TICKS - 1):
            watch.tick(3, asleep)
        assert not lost
        watch.heard(3)
    for _ in range(FROZEN_TICKS):
        watch.tick(3, asleep)
    assert asked == [3] * 3 * (FROZEN_TICKS - 1)  # each look that does not find it lost is followed by a ping
    seconds = (FROZEN_TICKS - 1) * PING_SECONDS
    assert lost == [(3, f"it has not answered for {seconds:g} s; no thread of process 7 can run")]


def test_ranks_are_counted_separately() -> None:
    lost: list[int] = []
    watch = PingWatch(lambda rank: None, lambda rank, reason: lost.append(rank))
    for _ in range(REMOTE_TICKS + 1):
        for rank in range(3):
            watch.tick(rank, None)
        watch.heard(1)
    assert lost == [0, 2]
