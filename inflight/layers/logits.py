"""`LogitsHead`: hidden states -> logits over the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.embedding import VocabParallelEmbedding
from inflight.layers.linear_method import select_linear_method
from inflight.layers.weights import WeightSlots


class LogitsHead(nn.Module):
    """Output features are sharded as the embedding's rows are, and gathered.

    `tied_embedding` is the table whose weights are the head's too. Where the linear method packs weights, the head then
    holds a packed copy beside the plain table: vocab_size x hidden_size elements more (Qwen3-0.6B in bf16: 311 MB),
    for a head that reads memory at 34 GB/s instead of 16.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_embedding: VocabParallelEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallelGroup,
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, tp
        self.method = select_linear_method(device, dtype)
        self.is_tied = tied_embedding is not None
        self.table = tied_embedding or VocabParallelEmbedding(
            vocab_size, hidden_size, dtype=dtype, device=device, tp=tp
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        if not self.is_tied:
            yield from self.table.weight_slots(prefix)

    def finish_loading(self) -> None:
        if not self.is_tied:
            self.table.finish_loading()
        self.weight = nn.Parameter(self.method.prepare(self.table.weight.data), False)
        del self.table  # the plain weights go with it, unless they are the embedding's

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_rows, vocab_size], contiguous; rounded to the engine's dtype."""
        logits = self.tp.all_gather(self.method.apply(hidden, self.weight, None))
        return logits[:, : self.vocab_size].float().contiguous()
