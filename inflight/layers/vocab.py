"""`VocabParallelEmbedding`: token ids -> hidden states. `LogitsHead`: hidden states -> logits over the whole vocabulary.

The vocabulary is divided among the tensor-parallel ranks.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from inflight.kernels.weight_rows import StoredWeight
from inflight.layers.context import LayerContext
from inflight.layers.linear_method import PreparedLinear
from inflight.layers.stored_parts import StoredParts
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class VocabParallelEmbedding(Loadable):
    """Each rank holds ceil(vocab_size / number of ranks) rows. The last rows of the last ranks are padding and zero.

    The table keeps this layout, even if a logits head with the same weights has a copy in the layout of its kernels.
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.vocab_size, self.tp = vocab_size, context.tp
        num_rows = -(-vocab_size // self.tp.size)
        self.start = min(self.tp.rank * num_rows, vocab_size)
        self.stop = min(self.start + num_rows, vocab_size)
        table = torch.empty(num_rows, hidden_size, dtype=context.dtype, device=context.weight_device)
        self.weight = nn.Parameter(table, False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        table = self.weight.data
        slot = WeightSlot(
            shape=(self.vocab_size, table.shape[1]), destination=table[: self.stop - self.start], start=self.start
        )
        yield f"{prefix}.weight", slot

    def finish_loading(self) -> None:
        self.weight.data[self.stop - self.start :].zero_()

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [num_tokens] -> [num_tokens, hidden_size], a new tensor."""
        if self.tp.size == 1:
            return torch.embedding(self.weight, input_ids)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        local_ids = (input_ids - self.start).masked_fill(elsewhere, 0)
        hidden = torch.embedding(self.weight, local_ids).masked_fill_(elsewhere.unsqueeze(-1), 0)
        return self.tp.all_reduce(hidden)

    def embed(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """The same, in models whose embeddings also depend on the positions and types of the tokens."""
        return self.forward(input_ids)


class LogitsHead(Loadable):
    """Each rank computes the logits of its part of the vocabulary, then the logits of all ranks are gathered.

    If `tied_embedding` is given, the head uses the embedding's weights. If the linear method has a weight layout of its own,
    the head makes a copy of the embedding's table in this layout, because the method reads only this layout at full speed. The
    copy has vocab_size x hidden_size elements (311 MB for Qwen3-0.6B in bf16).
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied_embedding: VocabParallelEmbedding | None, context: LayerContext
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, context.tp
        self.method = context.head
        self.is_tied = tied_embedding is not None
        self.stored = StoredParts(context.head, context.dtype)
        self.table = tied_embedding or VocabParallelEmbedding(vocab_size, hidden_size, context)

    def weight_slots(self, prefix: str) -> WeightSlots:
        if not self.is_tied:
            for name, slot in self.table.weight_slots(prefix):
                yield name, replace(slot, accept=self.stored.accept)

    def finish_loading(self) -> None:
        if not self.is_tied:
            self.table.finish_loading()
        self.multiply = self.prepare(self.stored.assemble(self.table.weight.data))
        del self.stored
        del self.table  # this frees the plain weights, unless the embedding uses them, too

    def prepare(self, weight: StoredWeight) -> PreparedLinear:
        return self.method.prepare(weight, None)

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_rows, vocab_size], contiguous; it is written to `out` if given."""
        if self.tp.size == 1:
            return self.multiply(hidden, torch.float32, out)
        logits = self.tp.all_gather(self.multiply(hidden, torch.float32))[:, : self.vocab_size]
        return logits.contiguous() if out is None else out.copy_(logits)
