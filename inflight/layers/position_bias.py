"""`PositionBias`: what the distance between a query and a key adds to their score. `add_bias`: adds it to an attention."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from inflight.config.mixers import AttentionSpec, PositionBiasSpec
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.sharding import head_shard
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class PositionBias(Loadable):
    """The biases of this rank's heads. `by_distance`: float32 [num_heads, 2 * radius + 1], for `AttentionParams`.

    The memory is allocated here, and not at loading, because the attention gets this tensor when the layer is made.
    """

    def __init__(self, num_heads: int, spec: PositionBiasSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec, self.shard = spec, head_shard(num_heads, 1, context.tp)
        table = torch.zeros(spec.num_buckets, self.shard.size, dtype=torch.float32, device=context.device)
        self.table = nn.Parameter(table, False)
        by_distance = torch.zeros(self.shard.size, 2 * spec.radius + 1, dtype=torch.float32, device=context.device)
        self.by_distance = nn.Parameter(by_distance, False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        shape = self.spec.num_buckets, self.shard.total
        yield (
            f"{self.spec.name}.weight",
            WeightSlot(shape=shape, destination=self.table.data, dim=1, start=self.shard.start),
        )

    def finish_loading(self) -> None:
        radius, device = self.spec.radius, self.table.device
        distances = torch.arange(-radius, radius + 1, dtype=torch.int64, device=device)
        self.by_distance.data.copy_(self.table.data[buckets(distances, self.spec)].T)
        del self.table


def add_bias(attention: Attention, spec: AttentionSpec, context: LayerContext) -> PositionBias:
    """Makes the bias of a layer with these heads, and lets `attention` add it to scores."""
    assert spec.position_bias is not None
    bias = PositionBias(spec.num_heads, spec.position_bias, context)
    attention.params = replace(attention.params, position_bias=bias.by_distance.data)
    return bias


def buckets(distances: Tensor, spec: PositionBiasSpec) -> Tensor:
    """The bucket of each distance, int64. `distances`: how far keys are behind their query; below 0: before it.

    Half of the buckets of each direction are for one distance each. The others grow with the logarithm of the distance.
    """
    of_direction = spec.num_buckets // 2
    num_exact = of_direction // 2
    lengths = distances.abs()
    growth = torch.log(lengths.float().clamp(min=1) / num_exact) / math.log(spec.max_distance / num_exact)
    wide = num_exact + (growth * (of_direction - num_exact)).long()
    found = torch.where(lengths < num_exact, lengths, wide.clamp(max=of_direction - 1))
    return found + torch.where(distances > 0, of_direction, 0)
