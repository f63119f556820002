"""`RankLayout`: which stage and which tensor-parallel part each rank computes. `ranks_of_node`: which ranks a machine runs."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import ConfigError


@dataclass(frozen=True)
class RankLayout:
    """Global rank = pp_rank * tensor_parallel_size + tp_rank. So the ranks of one stage have consecutive numbers."""

    tensor_parallel_size: int
    pipeline_parallel_size: int

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tensor_parallel_size

    def pp_rank(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def rank(self, tp_rank: int, pp_rank: int) -> int:
        return pp_rank * self.tensor_parallel_size + tp_rank

    def called_by(self, rank: int, *, has_drafts: bool) -> tuple[int, ...]:
        """The ranks to which `rank` opens connections: of two connected ranks, the rank with the lower number connects. The
        last stage sends the drawn tokens to the first stage or, with drafts, to all stages."""
        tp_rank, pp_rank, last = self.tp_rank(rank), self.pp_rank(rank), self.pipeline_parallel_size - 1
        stages = {pp_rank + 1, last} if pp_rank == 0 or has_drafts else {pp_rank + 1}
        later = (self.rank(tp_rank, stage) for stage in sorted(stages) if pp_rank < stage <= last)
        return (*range(rank + 1, self.rank(0, pp_rank + 1)), *later)


def ranks_of_node(world_size: int, nnodes: int, node_rank: int) -> range:
    """The global ranks of one node. The ranks are divided evenly among the nodes, in order.

    Raises:
        ConfigError: the ranks cannot be divided evenly, or there is no such node.
    """
    if world_size % nnodes:
        raise ConfigError(
            f"{world_size} ranks (tensor_parallel_size x pipeline_parallel_size) cannot be split evenly over "
            f"nnodes={nnodes}; change one of the sizes"
        )
    if not 0 <= node_rank < nnodes:
        raise ConfigError(
            f"node_rank={node_rank} is not in [0, {nnodes}), because nnodes={nnodes}; change one of the two"
        )
    count = world_size // nnodes
    return range(node_rank * count, (node_rank + 1) * count)
