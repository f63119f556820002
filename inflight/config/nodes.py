"""Which global ranks run on which node: they are split evenly, in order."""

from __future__ import annotations

from inflight.errors import ConfigError


def ranks_of_node(world_size: int, nnodes: int, node_rank: int) -> range:
    """
    Raises:
        ConfigError: the ranks cannot be split evenly, or there is no such node.
    """
    if world_size % nnodes:
        raise ConfigError(
            f"{world_size} ranks (tensor_parallel_size x pipeline_parallel_size) cannot be split evenly over "
            f"nnodes={nnodes}; change one of the sizes"
        )
    if not 0 <= node_rank < nnodes:
        raise ConfigError(
            f"node_rank={node_rank} is not in [0, {nnodes}), the nodes of nnodes={nnodes}; change one of the two"
        )
    count = world_size // nnodes
    return range(node_rank * count, (node_rank + 1) * count)
