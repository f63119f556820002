"""Linear layers whose weights are divided among the ranks of a tensor-parallel group."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from inflight.layers.context import LayerContext
from inflight.layers.linear_method import PreparedLinear
from inflight.layers.sharding import OutputShard, even_shard
from inflight.layers.stored_parts import StoredParts
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class Linear(Loadable):
    """x [num_tokens, in_features] -> [num_tokens, out_features]. The base class of the sharded layers below.

    `keeps_floats`: its weights are never quantized.
    """

    keeps_floats = False

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, context: LayerContext, gate: str | None = None
    ) -> None:
        super().__init__()
        dtype, device = context.dtype, context.weight_device
        self.in_features, self.gate = in_features, gate
        self.dtype, self.method = dtype, context.linear
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), False) if bias else None
        self.stored = StoredParts(context.linear, dtype)
        # The number of quantized parts that became floats, because their formats differ or other parts are floats.
        self.num_dequantized = 0

    def finish_loading(self) -> None:
        weight = self.stored.assemble(self.weight.data)
        if isinstance(weight, list):  # floats
            self.num_dequantized = self.stored.num_quantized
        self.multiply: PreparedLinear = self.method.prepare(
            weight, None if self.bias is None else self.bias.data, gate=self.gate
        )
        del self.weight, self.bias, self.stored

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.dtype)


class ColumnParallelLinear(Linear):
    """A linear layer whose output features are sharded. Several projections of one input are computed in one multiplication,
    with their outputs side by side.

    `parts`: the name of each projection -> the rows that this rank holds. The checkpoint has these names instead of the name of
    this layer. `gate`: there are two projections of equal size, and the result is gate(first) * second, [num_tokens, size] (see
    `LinearMethod`).
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, OutputShard],
        *,
        bias: bool,
        context: LayerContext,
        gate: str | None = None,
    ) -> None:
        out_features = sum(part.size for part in parts.values())
        super().__init__(in_features, out_features, bias=bias, context=context, gate=gate)
        self.parts = dict(parts)

    def weight_slots(self, prefix: str) -> WeightSlots:
        block, offset = prefix.rpartition(".")[0], 0
        for name, part in self.parts.items():
            rows, stored_as = slice(offset, offset + part.size), f"{block}.{part.source or name}"
            slot = WeightSlot(
                shape=(part.total, self.in_features),
                destination=self.weight.data[rows],
                start=part.start,
                accept=partial(self.stored.accept, first_row=offset),
                rows=part.order,
            )
            yield f"{stored_as}.weight", slot
            if self.bias is not None:
                bias = self.bias.data[rows]
                slot = WeightSlot(shape=(part.total,), destination=bias, start=part.start, rows=part.order)
                yield f"{stored_as}.bias", slot
            offset += part.size


class RowParallelLinear(Linear):
    """A linear layer whose input features are sharded. The ranks' partial sums are added up. Only rank 0 adds the bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, context: LayerContext) -> None:
        self.columns = even_shard(in_features, context.tp)
        super().__init__(self.columns.size, out_features, bias=bias, context=context)
        self.tp = context.tp

    def weight_slots(self, prefix: str) -> WeightSlots:
        destination = self.weight.data
        slot = WeightSlot(
            shape=(destination.shape[0], self.columns.total),
            destination=destination,
            dim=1,
            start=self.columns.start,
            accept=self.stored.accept,
        )
        yield f"{prefix}.weight", slot
        if self.bias is not None:
            yield f"{prefix}.bias", WeightSlot(shape=(destination.shape[0],), destination=self.bias.data)

    def finish_loading(self) -> None:
        if self.tp.rank != 0:
            self.bias = None
        super().finish_loading()

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(super().forward(x))
