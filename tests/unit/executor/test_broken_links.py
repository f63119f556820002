"""Which ranks are replaced because of broken links, and that a rank is replaced only once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator

import pytest

from inflight.errors import RankError, StepError
from inflight.executor import broken_links
from inflight.executor.broken_links import BrokenLinks, Link, smallest_cover
from inflight.executor.meeting import Meeting
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.recovery import recover
from inflight.interface.messages import WorkerFailure
from inflight.interface.start_up import Ready, StartUpFailed
from tests.conformance.configs import plan
from tests.unit.executor.processes import scripted_executor


def cost(rank: int) -> tuple[int, ...]:
    return 1, rank % 3, rank


def covers_all(links: list[Link], ranks: Collection[int]) -> bool:
    return all(not set(link).isdisjoint(ranks) for link in links)


def total_cost(ranks: Collection[int]) -> list[int]:
    return [sum(cost(rank)[i] for rank in ranks) for i in range(3)]


def test_no_other_cover_costs_less() -> None:
    draw = random.Random(3)
    for _ in range(200):
        num_ranks = draw.randint(2, 8)
        pairs = list(itertools.combinations(range(num_ranks), 2))
        links = draw.sample(pairs, draw.randint(0, min(len(pairs), 12)))
        covers = (
            ranks
            for size in range(num_ranks + 1)
            for ranks in itertools.combinations(range(num_ranks), size)
            if covers_all(links, ranks)
        )
        found = smallest_cover(links, cost)
        assert covers_all(links, found), (links, found)
        assert total_cost(found) == min(map(total_cost, covers)), (links, found)


def test_a_cut_between_two_machines_takes_no_time_to_solve() -> None:
    links = [(rank, peer) for rank in range(32) for peer in range(32, 64)]
    assert smallest_cover(links, cost) == set(range(32))


class Clock:
    """The time of `BrokenLinks`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(broken_links, "time", clock)
    return clock


def meeting(num_ranks: int, *links: Link) -> Meeting:
    """A meeting in which these links are broken."""
    found = Meeting(3, num_ranks)
    for rank in range(num_ranks):
        lost = tuple(peer for reporter, peer in links if reporter == rank)
        failure = WorkerFailure(type_name="LostPeerError", message="", traceback="", is_echo=True, lost_ranks=lost)
        found.take(StartUpFailed(rank=rank, failure=failure, epoch=3) if lost else Ready(rank=rank, epoch=3))
    return found


def after(clock: Clock, seconds: float, links: BrokenLinks, found: Meeting, *, has_new: bool = False) -> set[int]:
    clock.now += seconds
    return links.ranks_to_replace(found, has_new_ranks=has_new)


@pytest.mark.parametrize(
    ("broken", "local", "chosen"),
    [
        ([(0, 3), (1, 3), (2, 3)], range(4), {3}),
        ([(0, 1), (0, 2), (0, 3)], range(4), {0}),
        ([(0, 1)], range(4), {1}),  # 0 cannot reach 1, so it is more likely that 1 does not listen
        ([(0, 2), (0, 3), (1, 2), (1, 3)], range(2), {2, 3}),
        ([(0, 1), (1, 2)], range(4), {1}),
        ([(0, 2), (2, 3), (1, 3)], range(2), {2, 3}),
        ([(0, 1), (2, 3)], range(4), {1, 3}),
    ],
)
def test_the_fewest_ranks_are_replaced(clock: Clock, broken: list[Link], local: range, chosen: set[int]) -> None:
    links = BrokenLinks(local)
    assert after(clock, 0.0, links, meeting(4, *broken)) == set()
    assert after(clock, broken_links.LINK_SECONDS + 0.1, links, meeting(4, *broken)) == chosen == links.replaced


def test_local_ranks_are_preferred_when_both_ends_are_accused(clock: Clock) -> None:
    broken = (0, 1), (1, 0)
    for local in (range(1), range(1, 2)):
        links = BrokenLinks(local)
        after(clock, 0.0, links, meeting(2, *broken))
        assert after(clock, 6.0, links, meeting(2, *broken)) == set(local)


def test_only_links_that_stay_broken_count(clock: Clock) -> None:
    links, broken = BrokenLinks(range(2)), meeting(2, (0, 1))
    assert after(clock, 0.0, links, broken) == set()
    assert after(clock, 4.9, links, broken) == set()
    assert after(clock, 4.9, links, broken, has_new=True) == set()
    assert after(clock, 4.9, links, broken) == set()
    assert after(clock, 5.1, links, meeting(2)) == set()  # no rank has reported a link when another rank fails
    assert after(clock, 0.0, links, broken) == {1}


def test_no_rank_is_replaced_for_ever(clock: Clock) -> None:
    links = BrokenLinks(range(2))
    replaced = [after(clock, 5.1, links, meeting(2, (0, 1))) for _ in range(20)]
    assert [ranks for ranks in replaced if ranks] == [{1}, {0}]


def test_healthy_ranks_are_not_replaced_because_of_one_that_stays_cut_off(clock: Clock) -> None:
    links = BrokenLinks(range(4))
    replaced = [after(clock, 5.1, links, meeting(4, (0, 3), (1, 3), (2, 3))) for _ in range(20)]
    assert [ranks for ranks in replaced if ranks] == [{3}]


# -- with processes --------------------------------------------------------------------------------------------------


def error_of_a_step(executor: MultiprocExecutor) -> RankError:
    executor.collective_rpc("script", (0, 0, "raise", "bad luck"))
    error = executor.execute_model(plan(0), non_block=True).exception(timeout=300)
    assert isinstance(error, StepError)
    return error


@pytest.mark.parametrize("deaf", [1, 2])
def test_exactly_the_rank_that_cannot_be_reached_is_replaced(monkeypatch: pytest.MonkeyPatch, deaf: int) -> None:
    monkeypatch.setattr(broken_links, "LINK_SECONDS", 0.5)
    executor = scripted_executor(3)
    try:
        executor.collective_rpc("deafen", (deaf, 10**6))
        result = recover(executor, error_of_a_step(executor))
        assert result.replaced == result.cut_off == (deaf,)
        assert executor.execute_model(plan(1)).step_id == 1
    finally:
        executor.shutdown()


def test_a_link_that_comes_back_costs_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_links, "LINK_SECONDS", 300.0)  # three meetings may take longer than 5 s
    executor = scripted_executor(3)
    try:
        executor.collective_rpc("deafen", (2, 3))
        result = recover(executor, error_of_a_step(executor))
        assert (result.epoch, result.replaced, result.cut_off) == (4, (), ())
        assert executor.execute_model(plan(1)).step_id == 1
    finally:
        executor.shutdown()
