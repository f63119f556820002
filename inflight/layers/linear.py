"""Linear layers, sharded over a tensor-parallel group as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.linear_method import select_linear_method
from inflight.layers.weights import WeightSlot, WeightSlots


@dataclass(frozen=True)
class OutputPart:
    """Rows `[start, start + size)`, of `total` in the checkpoint, of one projection."""

    total: int
    start: int
    size: int


def even_part(total: int, tp: TensorParallelGroup) -> OutputPart:
    """The rank's share of rows that are divided evenly."""
    assert total % tp.size == 0, f"{total} rows cannot be divided among {tp.size} ranks"
    size = total // tp.size
    return OutputPart(total=total, start=tp.rank * size, size=size)


def head_part(num_heads: int, head_dim: int, tp: TensorParallelGroup) -> OutputPart:
    """The rank's share of heads. With fewer heads than ranks, neighbouring ranks hold copies of the same head."""
    num_shards = min(num_heads, tp.size)
    assert num_heads % num_shards == 0 and tp.size % num_shards == 0, f"{num_heads} heads, {tp.size} ranks"
    size = num_heads // num_shards * head_dim
    return OutputPart(total=num_heads * head_dim, start=tp.rank * num_shards // tp.size * size, size=size)


class Linear(nn.Module):
    """x [num_tokens, in_features] -> [num_tokens, out_features]; what the sharded kinds below have in common."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.method = select_linear_method(device, dtype)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), False) if bias else None

    def finish_loading(self) -> None:
        self.weight = nn.Parameter(self.method.prepare(self.weight.data), False)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(x, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """Output features are sharded. Several projections of one input are one multiplication, their outputs side by side.

    `parts`: the name of each projection in the checkpoint, below the prefix -> the rows that this rank holds.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, OutputPart],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        out_features = sum(part.size for part in parts.values())
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device=device)
        self.in_features = in_features
        self.parts = dict(parts)

    def weight_slots(self, prefix: str) -> WeightSlots:
        offset = 0
        for name, part in self.parts.items():
            rows = slice(offset, offset + part.size)
            yield (
                f"{prefix}.{name}.weight",
                WeightSlot(shape=(part.total, self.in_features), destination=self.weight.data[rows], start=part.start),
            )
            if self.bias is not None:
                slot = WeightSlot(shape=(part.total,), destination=self.bias.data[rows], start=part.start)
                yield f"{prefix}.{name}.bias", slot
            offset += part.size


class RowParallelLinear(Linear):
    """Input features are sharded; the ranks' partial sums are added up. Rank 0 alone adds the bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallelGroup,
    ) -> None:
        self.columns = even_part(in_features, tp)
        super().__init__(self.columns.size, out_features, bias=bias, dtype=dtype, device=device)
        self.tp = tp

    def weight_slots(self, prefix: str) -> WeightSlots:
        destination = self.weight.data
        shape = (destination.shape[0], self.columns.total)
        yield f"{prefix}.weight", WeightSlot(shape=shape, destination=destination, dim=1, start=self.columns.start)
        if self.bias is not None:
            yield f"{prefix}.bias", WeightSlot(shape=(destination.shape[0],), destination=self.bias.data)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.tp.rank > 0:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(super().forward(x))
