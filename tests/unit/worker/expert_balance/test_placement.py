"""Which experts get copies: numbers are compared with the best copies that there are, where these can be tried out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.kernels.cpu.expert_balance import EMPTY, Homes, Indices
from inflight.worker.expert_balance.placement import place_copies


def homes_of(num_experts: int, num_places: int, num_ranks: int) -> Homes:
    experts, places = (np.arange(count) * num_ranks // count for count in (num_experts, num_places))
    return Homes(num_ranks, 0, experts, places)


def empty(num_layers: int, num_places: int) -> Indices:
    return np.full((num_layers, num_places), EMPTY)


def busiest_without_copies(loads: Indices, homes: Homes) -> Indices:
    return np.array([loads[:, homes.of_expert == rank].sum(1) for rank in range(homes.num_ranks)]).max(0)


def least_busiest(loads: list[int], homes: Homes, copies: tuple[int, ...]) -> float:
    """The work of the busiest rank if it is divided as well as possible: the largest mean work of a set of ranks. An expert
    counts for a set if all ranks that have it are in the set."""
    holders = [{int(home)} for home in homes.of_expert]
    for place, expert in enumerate(copies):
        if expert != EMPTY:
            holders[expert].add(int(homes.of_place[place]))
    ranks = range(homes.num_ranks)
    sets = (set(some) for count in range(1, len(ranks) + 1) for some in itertools.combinations(ranks, count))
    return max(sum(load for load, has in zip(loads, holders, strict=True) if has <= some) / len(some) for some in sets)


@given(loads=st.lists(st.integers(0, 1000), min_size=6, max_size=6), num_ranks=st.sampled_from([2, 3]))
def test_copies_are_about_as_good_as_the_best_ones(loads: list[int], num_ranks: int) -> None:
    homes = homes_of(6, num_ranks, num_ranks)
    placement = place_copies(np.array([loads]), homes, empty(1, num_ranks))
    before = int(busiest_without_copies(np.array([loads]), homes)[0])
    of_place = [[EMPTY, *(expert for expert in range(6) if homes.of_expert[expert] != rank)] for rank in homes.of_place]
    best = min(least_busiest(loads, homes, copies) for copies in itertools.product(*of_place))
    found = least_busiest(loads, homes, tuple(placement.copies[0].tolist()))
    assert found <= before
    assert found - best <= (before - best) * 0.5 + sum(loads) / 20, "greedy, but at least half of what can be gained"


@given(
    loads=st.lists(st.lists(st.integers(0, 100_000), min_size=16, max_size=16), min_size=1, max_size=4),
    num_places=st.integers(1, 9),
)
def test_a_copy_is_on_another_rank_and_once_on_a_rank(loads: list[list[int]], num_places: int) -> None:
    homes = homes_of(16, num_places, 4)
    placement = place_copies(np.array(loads), homes, empty(len(loads), num_places))
    for copies in placement.copies:
        for rank in range(4):
            on_rank = [int(each) for each in copies[homes.of_place == rank] if each != EMPTY]
            assert len(set(on_rank)) == len(on_rank)
            assert all(homes.of_expert[each] != rank for each in on_rank)
    again = place_copies(np.array(loads), homes, placement.copies)
    assert np.array_equal(again.copies, placement.copies), "the same work needs no other copies"
    assert (placement.busiest <= busiest_without_copies(np.array(loads), homes)).all()


def test_without_work_there_are_no_copies() -> None:
    homes = homes_of(8, 4, 2)
    assert (place_copies(np.zeros((3, 8), dtype=np.int64), homes, empty(3, 4)).copies == EMPTY).all()
    equal = place_copies(np.full((3, 8), 10), homes, empty(3, 4))
    assert (equal.copies == EMPTY).all() and equal.busiest.tolist() == [40] * 3


def test_a_copy_that_stays_on_its_rank_stays_in_its_place() -> None:
    homes = homes_of(8, 4, 2)  # places 0 and 1 are of rank 0, experts 4 to 7 of rank 1
    now = np.array([[EMPTY, 6, EMPTY, EMPTY]])
    loads = np.array([[0, 0, 0, 0, 500, 0, 400, 0]])
    found = place_copies(loads, homes, now).copies[0]
    assert found[1] == 6 or 6 not in found
    loads = np.array([[0, 0, 0, 0, 0, 300, 400, 300]])
    assert place_copies(loads, homes, np.array([[EMPTY, 5, EMPTY, EMPTY]])).busiest[0] <= 700


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_copies_stay_if_others_would_do_little_good(factor: float) -> None:
    homes = homes_of(8, 2, 2)
    now = np.array([[4, EMPTY]])
    loads = np.array([[0, 0, 0, 0, int(1000 * factor), 1000, 0, 0]])
    assert place_copies(loads, homes, now).copies.tolist() == now.tolist()
