"""`VocabParallelEmbedding`: token ids -> hidden states. The vocabulary is divided among the tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class VocabParallelEmbedding(Loadable):
    """Each rank holds ceil(vocab_size / group size) rows. The last rows of the last ranks are padding and zero.

    The table keeps this layout, even if a logits head with the same weights has a copy in the layout of its kernels.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device, tp: TensorParallelGroup
    ) -> None:
        super().__init__()
        self.vocab_size, self.tp = vocab_size, tp
        num_rows = -(-vocab_size // tp.size)
        self.start = min(tp.rank * num_rows, vocab_size)
        self.stop = min(self.start + num_rows, vocab_size)
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size, dtype=dtype, device=device), False)

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
            return F.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        local_ids = (input_ids - self.start).masked_fill(elsewhere, 0)
        hidden = F.embedding(local_ids, self.weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
        return self.tp.all_reduce(hidden)
