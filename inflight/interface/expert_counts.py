"""`ExpertCounts`: how evenly the ranks of several replicas compute the experts that they divide."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import add


@dataclass(slots=True)
class ExpertCounts:
    """What has happened in some time.

    Attributes:
        num_ranks: the ranks that divide the experts.
        num_blocks: how much all ranks have computed, in blocks of up to 16 rows of one expert.
        busiest_blocks: how much the busiest rank has, in each layer of each step, added up.
        num_rebalances: how often other experts got copies.
        num_copies: copies that have come and were used.
        num_given_up: how often copies did not come before the next decision.
    """

    num_ranks: int = 0
    num_blocks: int = 0
    busiest_blocks: int = 0
    num_rebalances: int = 0
    num_copies: int = 0
    num_given_up: int = 0

    def __add__(self, later: ExpertCounts) -> ExpertCounts:
        (_, *mine), (num_ranks, *others) = astuple(self), astuple(later)
        return ExpertCounts(num_ranks, *map(add, mine, others))

    @property
    def balance(self) -> float | None:
        """The mean work of a rank divided by that of the busiest one, at most 1; None: nothing was computed."""
        return self.num_blocks / (self.num_ranks * self.busiest_blocks) if self.busiest_blocks else None


def sum_of_experts(earlier: ExpertCounts | None, later: ExpertCounts | None) -> ExpertCounts | None:
    """None if no counts have come."""
    return earlier + later if earlier is not None and later is not None else earlier or later
