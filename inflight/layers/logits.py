"""`LogitsHead`: hidden states -> logits over the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inflight.layers.context import LayerContext
from inflight.layers.embedding import VocabParallelEmbedding
from inflight.layers.linear import StoredParts
from inflight.layers.weights import Loadable, WeightSlots


class LogitsHead(Loadable):
    """Each rank computes the logits of its part of the vocabulary, then the logits of all ranks are gathered. The vocabulary is
    divided among the ranks in the same way as in the embedding.

    If `tied_embedding` is given, the head uses its weights. If the linear method has a weight layout of its own, the head has a
    copy in this layout besides the embedding's table, because only this layout is read at full speed. The copy has
    vocab_size x hidden_size elements (311 MB for Qwen3-0.6B in bf16).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_embedding: VocabParallelEmbedding | None,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, context.tp
        self.method = context.head
        self.is_tied = tied_embedding is not None
        self.stored = StoredParts(context.head, context.dtype)
        self.table = tied_embedding or VocabParallelEmbedding(
            vocab_size, hidden_size, dtype=context.dtype, device=context.weight_device, tp=context.tp
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        if not self.is_tied:
            for name, slot in self.table.weight_slots(prefix):
                yield name, replace(slot, accept=self.stored.accept)

    def finish_loading(self) -> None:
        if not self.is_tied:
            self.table.finish_loading()
        self.multiply = self.method.prepare(self.stored.assemble(self.table.weight.data), None)
        del self.stored
        del self.table  # this frees the plain weights, unless the embedding uses them, too

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_rows, vocab_size], contiguous; it is written to `out` if given."""
        if self.tp.size == 1:
            return self.multiply(hidden, torch.float32, out)
        logits = self.tp.all_gather(self.multiply(hidden, torch.float32))[:, : self.vocab_size]
        return logits.contiguous() if out is None else out.copy_(logits)
