"""Which rows of a weight a rank holds (`OutputShard`), and in which order (`row_order`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.config.mixers import RopeConfig
from inflight.distributed.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True)
class OutputShard:
    """The rows of one projection that this rank holds: `[start, start + size)` of the `total` rows in the checkpoint. The
    layer's row i of them is the checkpoint's row `start + order[i]`; without an `order`, the rows are in the same order.
    `source`: the name of the tensor in the checkpoint, if it is not the name of the projection."""

    total: int
    start: int
    size: int
    order: Tensor | None = None
    source: str | None = None


def fused(source: str, parts: Mapping[str, OutputShard]) -> dict[str, OutputShard]:
    """The same projections, if the checkpoint has one tensor `source` with the rows of all of them, one behind the other."""
    total = sum(part.total for part in parts.values())
    first = 0
    found = {}
    for name, part in parts.items():
        found[name] = replace(part, total=total, start=first + part.start, source=source)
        first += part.total
    return found


def even_shard(total: int, tp: TensorParallelGroup) -> OutputShard:
    """This rank's shard of `total` rows that are divided evenly among the ranks."""
    assert total % tp.size == 0, f"{total} rows cannot be divided among {tp.size} ranks"
    size = total // tp.size
    return OutputShard(total=total, start=tp.rank * size, size=size)


def head_shard(num_heads: int, head_dim: int, tp: TensorParallelGroup) -> OutputShard:
    """This rank's shard of the heads. If there are fewer heads than ranks, neighbouring ranks hold copies of the same head."""
    num_shards = min(num_heads, tp.size)
    assert num_heads % num_shards == 0 and tp.size % num_shards == 0, f"{num_heads} heads, {tp.size} ranks"
    size = num_heads // num_shards * head_dim
    return OutputShard(total=num_heads * head_dim, start=tp.rank * num_shards // tp.size * size, size=size)


def row_order(rope: RopeConfig | None, head_dim: int) -> Tensor | None:
    """Returns the dimensions of a head in the checkpoint, in the order in which the pairs of `rope` are (i, i + head_dim / 2).
    First come the pairs that are rotated. None: the order in the checkpoint is right."""
    if rope is None or rope.kind == "proportional" or (not rope.interleaved and rope.rotary_dim in (None, head_dim)):
        return None
    rotary_dim = rope.rotary_dim or head_dim
    rotated = torch.arange(rotary_dim, dtype=torch.int64, device="cpu")
    firsts, seconds = (rotated[::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    passed = (
        torch.arange(rotary_dim, head_dim, dtype=torch.int64, device="cpu").chunk(2)
        if rotary_dim < head_dim
        else (rotated[:0], rotated[:0])
    )
    return torch.cat((firsts, passed[0], seconds, passed[1]))


def repeat_order(order: Tensor, num_rows: int) -> Tensor:
    """Returns the order of `num_rows` rows in which the rows of each head have the order `order`."""
    starts = torch.arange(0, num_rows, len(order), dtype=torch.int64, device="cpu")
    return (starts[:, None] + order).flatten()
