"""`place_copies`: which experts get copies, and on which ranks. All ranks compute this for themselves, and find the same.

An expert with copies can be computed by each rank that has it, and the kernels give its rows to the ranks that have the least
to do (kernels/cpu/experts.cpp). So a copy takes work from a busy rank. All numbers are integers, so no rank rounds them in
another way.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inflight.kernels.cpu.expert_balance import EMPTY, Homes, Indices

_SWEEPS = 2  # work goes from rank to rank so often until they are as equally busy as they will be
_LEAST_PART = 200  # a copy must take at least this part of the mean work of a rank, 1 / 200
_BETTER_PART = 20  # other copies than now must make the work of the busiest rank less by this part, 1 / 20


@dataclass(frozen=True)
class Placement:
    """
    Attributes:
        copies: [num_layers, places of all ranks], the expert in each place, or EMPTY.
        busiest: [num_layers], the work of the busiest rank that is expected.
    """

    copies: Indices
    busiest: Indices


def place_copies(loads: Indices, homes: Homes, now: Indices) -> Placement:
    """
    Args:
        loads: [num_layers, num_experts], how much there was to do for each expert.
        now: [num_layers, places of all ranks], the copies that there are. A layer keeps them if others would do little good. A
            copy that stays on its rank stays in its place.
    """
    current = _Spread(loads, homes)
    found = _Spread(loads, homes)
    for place in range(now.shape[1]):
        current.put(np.full(len(loads), place), now[:, place])
    for _ in range(now.shape[1]):
        found.put_best()
    for each in (current, found):
        each.settle()
    is_better = found.busiest * _BETTER_PART < current.busiest * (_BETTER_PART - 1)
    copies = np.where(is_better[:, None], found.copies, now)
    for layer in np.flatnonzero(is_better):
        copies[layer] = _in_their_places(copies[layer], now[layer], homes)
    return Placement(copies, np.where(is_better, found.busiest, current.busiest))


class _Spread:
    """How the work of all layers is spread over the ranks.

    Attributes:
        copies: as in `Placement`.
    """

    def __init__(self, loads: Indices, homes: Homes) -> None:
        self._homes = homes
        self._layers = np.arange(len(loads))
        num_places = len(homes.of_place)
        self.copies: Indices = np.full((len(loads), num_places), EMPTY)
        self._of_rank = np.zeros((len(loads), homes.num_ranks), dtype=np.int64)
        for rank in range(homes.num_ranks):
            self._of_rank[:, rank] = loads[:, homes.of_expert == rank].sum(1)
        self._at_home = loads.copy()  # the work of each expert that its home does
        self._in_place = np.zeros((len(loads), num_places), dtype=np.int64)  # the work that is done in each place
        self._least = self._of_rank.sum(1) // (_LEAST_PART * homes.num_ranks)

    @property
    def busiest(self) -> Indices:
        found: Indices = self._of_rank.max(1)
        return found

    def put(self, places: Indices, experts: Indices) -> None:
        """Put an expert into a place of each layer, or nothing where `experts` is EMPTY."""
        is_filled = experts != EMPTY
        self.copies[self._layers[is_filled], places[is_filled]] = experts[is_filled]
        self._level(places)

    def put_best(self) -> None:
        """Find the busiest rank of each layer, and the idlest rank with a free place. Put the expert there that takes most."""
        layers, homes = self._layers, self._homes
        busiest = self._of_rank.argmax(1)
        idle = np.where(self.copies == EMPTY, self._of_rank[:, homes.of_place], np.iinfo(np.int64).max)
        places = idle.argmin(1)
        room = (self._of_rank[layers, busiest] - idle[layers, places]) // 2
        work = np.where(homes.of_expert == busiest[:, None], self._at_home, 0)
        work[self._are_on(homes.of_place[places])] = 0
        experts = work.argmax(1)
        taken = np.minimum(work[layers, experts], room)
        self.put(places, np.where(taken > self._least, experts, EMPTY))

    def settle(self) -> None:
        """The copies of one layer depend on each other: spread the work again with all of them."""
        for _ in range(_SWEEPS):
            for place in range(self.copies.shape[1]):
                self._level(np.full(len(self._layers), place))

    def _level(self, places: Indices) -> None:
        """In a place of each layer: do so much of its expert's work there that its rank and the expert's home have the same to
        do, if possible."""
        layers, homes = self._layers, self._homes
        experts = self.copies[layers, places]
        ranks, home = homes.of_place[places], homes.of_expert[experts]
        difference = (self._of_rank[layers, home] - self._of_rank[layers, ranks]) // 2
        moved = np.clip(difference, -self._in_place[layers, places], self._at_home[layers, experts])
        moved = np.where(experts == EMPTY, 0, moved)
        self._of_rank[layers, home] -= moved
        self._of_rank[layers, ranks] += moved
        self._at_home[layers, experts] -= moved
        self._in_place[layers, places] += moved

    def _are_on(self, ranks: Indices) -> npt.NDArray[np.bool_]:
        """[num_layers, num_experts]: which experts have a copy on the rank that is given for their layer."""
        found = np.zeros(self._at_home.shape, dtype=np.bool_)
        for place, owner in enumerate(self._homes.of_place):
            experts = self.copies[:, place]
            is_there = (experts != EMPTY) & (ranks == owner)
            found[self._layers[is_there], experts[is_there]] = True
        return found


def _in_their_places(copies: Indices, now: Indices, homes: Homes) -> Indices:
    """The copies of a layer, on the same ranks, but those that are on their rank now stay where they are."""
    found: Indices = np.full_like(copies, EMPTY)
    for rank in range(homes.num_ranks):
        places = np.flatnonzero(homes.of_place == rank)
        wanted = {int(each) for each in copies[places]} - {EMPTY}
        for place in places:
            if int(now[place]) in wanted:
                found[place] = now[place]
                wanted.remove(int(now[place]))
        free = (place for place in places if found[place] == EMPTY)
        for place, expert in zip(free, sorted(wanted), strict=False):
            found[place] = expert
    return found
