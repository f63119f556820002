"""`BiasedHead`: a head whose logits have a bias."""

import torch
from torch import nn

from inflight.kernels.weight_rows import StoredWeight
from inflight.layers.context import LayerContext
from inflight.layers.linear_method import PreparedLinear
from inflight.layers.vocab import LogitsHead, VocabParallelEmbedding
from inflight.layers.weights import WeightSlot, WeightSlots


class BiasedHead(LogitsHead):
    """The rows and the bias of a rank are those of its part of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied_embedding: VocabParallelEmbedding | None, context: LayerContext
    ) -> None:
        super().__init__(vocab_size, hidden_size, tied_embedding=tied_embedding, context=context)
        assert not self.is_tied, "no family has a bias beside the embedding's weights"
        zeros = torch.zeros(len(self.table.weight), dtype=context.dtype, device=context.weight_device)
        self.bias = nn.Parameter(zeros, False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        own = self.bias.data[: self.table.stop - self.table.start]
        yield f"{prefix}.bias", WeightSlot(shape=(self.vocab_size,), destination=own, start=self.table.start)

    def prepare(self, weight: StoredWeight) -> PreparedLinear:
        bias = self.bias.data
        del self.bias
        bias[self.table.stop - self.table.start :].zero_()  # padding
        return self.method.prepare(weight, bias)
