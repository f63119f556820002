"""`AttentionSinks`: for each query head one more logit in the softmax of the attention, which belongs to no key."""

import torch
from torch import nn

from inflight.layers.context import LayerContext
from inflight.layers.sharding import head_shard
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class AttentionSinks(Loadable):
    """The sinks of this rank's heads (arXiv:2309.17453). `logits`: float32 [num_heads], for `AttentionParams`.

    The memory is allocated here, and not at loading, because the attention gets this tensor when the layer is made.
    """

    def __init__(self, num_heads: int, context: LayerContext) -> None:
        super().__init__()
        self.shard = head_shard(num_heads, 1, context.tp)
        zeros = torch.zeros(self.shard.size, dtype=torch.float32, device=context.device)
        self.logits = nn.Parameter(zeros, False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slot = WeightSlot(shape=(self.shard.total,), destination=self.logits.data, start=self.shard.start)
        yield prefix, slot
