"""Linear layers, sharded over a tensor-parallel group as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.context import LayerContext
from inflight.layers.linear_method import LinearMethod, PreparedLinear
from inflight.layers.quantized_weight import QuantizedWeight, concatenate_rows
from inflight.layers.weights import WeightSlot, WeightSlots

# first output feature -> the part that the layer has been given as it is stored
StoredParts = dict[int, Tensor | QuantizedWeight]


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

    def __init__(self, in_features: int, out_features: int, *, bias: bool, context: LayerContext) -> None:
        super().__init__()
        dtype, device = context.dtype, context.weight_device
        self.in_features = in_features
        self.dtype, self.method = dtype, context.linear
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), False) if bias else None
        self.stored: StoredParts = {}
        self.num_dequantized = 0  # of them, those that the other parts did not let stay so

    def finish_loading(self) -> None:
        self.prepare(self.bias)

    def prepare(self, bias: Tensor | None, *, is_gated: bool = False) -> None:
        """Bring the weights into the form that `multiply` reads, and drop the plain ones."""
        weight = assemble(self.weight.data, self.stored)
        if not isinstance(weight, QuantizedWeight):
            self.num_dequantized = sum(isinstance(part, QuantizedWeight) for part in self.stored.values())
        self.multiply: PreparedLinear = self.method.prepare(
            weight, None if bias is None else bias.data, is_gated=is_gated
        )
        del self.weight, self.bias, self.stored

    def accept(self, part: Tensor | QuantizedWeight, *, first_row: int = 0) -> bool:
        """See `WeightSlot`."""
        return accept(part, self.stored, first_row, self.method, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.dtype)


def accept(
    part: Tensor | QuantizedWeight, stored: StoredParts, first_row: int, method: LinearMethod, dtype: torch.dtype
) -> bool:
    """Whether the part is kept as it is: not if it has to be converted first, or would be kept for good."""
    if isinstance(part, Tensor) and not (method.copies_weights and part.dtype == dtype and part.stride(1) == 1):
        return False
    stored[first_row] = part
    return True


def assemble(weight: Tensor, stored: StoredParts) -> Sequence[Tensor] | QuantizedWeight:
    """Quantized, if all parts are, and as they are stored, if none is. Else all are brought into the dtype of `weight`."""
    parts = [stored[start] for start in sorted(stored)]
    if parts and sum(part.shape[0] for part in parts) == len(weight):
        floats = [part for part in parts if isinstance(part, Tensor)]
        if len(floats) == len(parts):
            return floats
        together = (
            concatenate_rows([part for part in parts if isinstance(part, QuantizedWeight)]) if not floats else None
        )
        if together is not None:
            return together
    for start, part in stored.items():
        weight[start : start + part.shape[0]] = part if isinstance(part, Tensor) else part.dequantize()
    return [weight]


class ColumnParallelLinear(Linear):
    """Output features are sharded. Several projections of one input are one multiplication, their outputs side by side.

    `parts`: the name of each projection in the checkpoint, below the prefix -> the rows that this rank holds.
    `is_gated`: there are two, and the result is silu(first) * second, [num_tokens, rows of one].
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, OutputPart],
        *,
        bias: bool,
        context: LayerContext,
        is_gated: bool = False,
    ) -> None:
        super().__init__(in_features, sum(part.size for part in parts.values()), bias=bias, context=context)
        self.parts = dict(parts)
        self.is_gated = is_gated

    def weight_slots(self, prefix: str) -> WeightSlots:
        offset = 0
        for name, part in self.parts.items():
            rows = slice(offset, offset + part.size)
            slot = WeightSlot(
                shape=(part.total, self.in_features),
                destination=self.weight.data[rows],
                start=part.start,
                accept=partial(self.accept, first_row=offset),
            )
            yield f"{prefix}.{name}.weight", slot
            if self.bias is not None:
                slot = WeightSlot(shape=(part.total,), destination=self.bias.data[rows], start=part.start)
                yield f"{prefix}.{name}.bias", slot
            offset += part.size

    def finish_loading(self) -> None:
        self.prepare(self.bias, is_gated=self.is_gated)


class RowParallelLinear(Linear):
    """Input features are sharded; the ranks' partial sums are added up. Rank 0 alone adds the bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, context: LayerContext) -> None:
        self.columns = even_part(in_features, context.tp)
        super().__init__(self.columns.size, out_features, bias=bias, context=context)
        self.tp = context.tp

    def weight_slots(self, prefix: str) -> WeightSlots:
        destination = self.weight.data
        slot = WeightSlot(
            shape=(destination.shape[0], self.columns.total),
            destination=destination,
            dim=1,
            start=self.columns.start,
            accept=self.accept,
        )
        yield f"{prefix}.weight", slot
        if self.bias is not None:
            yield f"{prefix}.bias", WeightSlot(shape=(destination.shape[0],), destination=self.bias.data)

    def finish_loading(self) -> None:
        self.prepare(self.bias if self.tp.rank == 0 else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(super().forward(x))
