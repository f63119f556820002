"""`RankLayout`: which stage and which tensor-parallel part each rank computes. `Place`: where a rank runs. `ranks_of_node`: the
ranks of a node, if the ranks are divided evenly among the nodes."""

from __future__ import annotations

from collections.abc import Sequence
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
        tp_rank = self.tp_rank(rank)
        pp_rank = self.pp_rank(rank)
        last = self.pipeline_parallel_size - 1
        stages = {pp_rank + 1, last} if pp_rank == 0 or has_drafts else {pp_rank + 1}
        later = (self.rank(tp_rank, stage) for stage in sorted(stages) if pp_rank < stage <= last)
        return (*range(rank + 1, self.rank(0, pp_rank + 1)), *later)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank a worker is, and where it runs. The executor tells each rank its place.

    Attributes:
        rank: the global rank.
        machine: the number of its machine. The engine runs on machine 0.
        local_rank: its number among the ranks of all replicas on its machine.
        num_local_ranks: how many ranks of all replicas are on its machine.
        num_engine_ranks: how many of these belong to its own engine.
        device_index: the number of its GPU among those that its process can see.
    """

    rank: int
    machine: int
    local_rank: int
    num_local_ranks: int
    num_engine_ranks: int
    device_index: int


def places_on(machines: Sequence[int], *, replica: int = 0, num_replicas: int = 1) -> tuple[Place, ...]:
    """Returns the places of the ranks of one replica. `machines` has the machine of each rank. The ranks of the other replicas
    are on the same machines."""
    places = []
    for rank, machine in enumerate(machines):
        count = machines.count(machine)
        local_rank = replica * count + machines[:rank].count(machine)
        place = Place(
            rank=rank,
            machine=machine,
            local_rank=local_rank,
            num_local_ranks=num_replicas * count,
            num_engine_ranks=count,
            device_index=local_rank,
        )
        places.append(place)
    return tuple(places)


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
