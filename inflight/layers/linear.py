"""Linear layers whose weights are divided among the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.quantized_weight import QuantizedWeight, concatenate_rows
from inflight.layers.context import LayerContext
from inflight.layers.linear_method import LinearMethod, PreparedLinear
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


@dataclass(frozen=True)
class OutputPart:
    """The rows of one projection that this rank holds: `[start, start + size)` of the `total` rows in the checkpoint. The
    layer's row i of them is the checkpoint's row `start + order[i]`; without an `order`, the rows are in the same order.
    `source`: the name of the tensor in the checkpoint, if it is not the name of the projection."""

    total: int
    start: int
    size: int
    order: Tensor | None = None
    source: str | None = None


def fused(source: str, parts: Mapping[str, OutputPart]) -> dict[str, OutputPart]:
    """The same projections, if the checkpoint has one tensor `source` with the rows of all of them, one behind the other."""
    total, first, found = sum(part.total for part in parts.values()), 0, {}
    for name, part in parts.items():
        found[name] = replace(part, total=total, start=first + part.start, source=source)
        first += part.total
    return found


def even_part(total: int, tp: TensorParallelGroup) -> OutputPart:
    """This rank's part of `total` rows that are divided evenly among the ranks."""
    assert total % tp.size == 0, f"{total} rows cannot be divided among {tp.size} ranks"
    size = total // tp.size
    return OutputPart(total=total, start=tp.rank * size, size=size)


def head_part(num_heads: int, head_dim: int, tp: TensorParallelGroup) -> OutputPart:
    """This rank's part of the heads. If there are fewer heads than ranks, neighbouring ranks hold copies of the same head."""
    num_shards = min(num_heads, tp.size)
    assert num_heads % num_shards == 0 and tp.size % num_shards == 0, f"{num_heads} heads, {tp.size} ranks"
    size = num_heads // num_shards * head_dim
    return OutputPart(total=num_heads * head_dim, start=tp.rank * num_shards // tp.size * size, size=size)


class StoredParts:
    """The parts of one weight, as the checkpoint stores them. A layer keeps them until it puts its weight together."""

    def __init__(self, method: LinearMethod, dtype: torch.dtype) -> None:
        self._method, self._dtype = method, dtype
        self._parts: dict[int, Tensor | QuantizedWeight] = {}  # by the first row in the whole weight

    @property
    def num_quantized(self) -> int:
        return sum(isinstance(part, QuantizedWeight) for part in self._parts.values())

    def accept(self, part: Tensor | QuantizedWeight, *, first_row: int = 0) -> bool:
        """See `WeightSlot.accept`. Floats are kept only if they need no conversion and `LinearMethod.prepare` copies them."""
        if isinstance(part, Tensor) and not (
            self._method.copies_weights and part.dtype == self._dtype and part.stride(1) == 1
        ):
            return False
        self._parts[first_row] = part
        return True

    def assemble(self, weight: Tensor) -> Sequence[Tensor] | QuantizedWeight:
        """Returns the whole weight. If all parts were accepted and fit together, the result is one quantized weight, or the
        floats as they are stored. Otherwise the result is `weight`. The loader has already copied the parts that were not
        accepted to `weight`, and this method copies the accepted parts."""
        parts = [part for _, part in sorted(self._parts.items(), key=lambda item: item[0])]
        if parts and sum(part.shape[0] for part in parts) == len(weight):
            floats = [part for part in parts if isinstance(part, Tensor)]
            quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
            if not quantized:
                return floats
            if not floats and (together := concatenate_rows(quantized)) is not None:
                return together
        for start, part in self._parts.items():
            weight[start : start + part.shape[0]] = part if isinstance(part, Tensor) else part.dequantize()
        return [weight]


class Linear(Loadable):
    """x [num_tokens, in_features] -> [num_tokens, out_features]. The base class of the sharded layers below."""

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
        if not isinstance(weight, QuantizedWeight):
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
        parts: Mapping[str, OutputPart],
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
                yield (
                    f"{stored_as}.bias",
                    WeightSlot(shape=(part.total,), destination=bias, start=part.start, rows=part.order),
                )
            offset += part.size


class RowParallelLinear(Linear):
    """A linear layer whose input features are sharded. The ranks' partial sums are added up. Only rank 0 adds the bias."""

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
