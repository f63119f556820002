"""`IntermediateTensors`: the hidden states that one pipeline stage sends to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """Two tensors, both [num_tokens, hidden_size], contiguous, in the engine's dtype.

    `delta` is the output of the MLP in the stage's last layer. The norm in the next layer adds `delta` to `residual`, just as
    between two layers of one stage.
    """

    delta: Tensor
    residual: Tensor

    def empty_like(self, num_tokens: int) -> IntermediateTensors:
        """Memory for `num_tokens` tokens, with undefined contents."""
        shape = (num_tokens, self.delta.shape[1])
        return IntermediateTensors(self.delta.new_empty(shape), self.residual.new_empty(shape))

    def padded(self, num_tokens: int) -> IntermediateTensors:
        """Returns tensors for `num_tokens` tokens: first these tokens, then undefined contents."""
        if num_tokens == len(self.delta):
            return self
        padded = self.empty_like(num_tokens)
        padded.delta[: len(self.delta)] = self.delta
        padded.residual[: len(self.delta)] = self.residual
        return padded

    def first(self, num_tokens: int) -> IntermediateTensors:
        """Views of the first tokens."""
        return IntermediateTensors(self.delta[:num_tokens], self.residual[:num_tokens])

    @staticmethod
    def template(hidden_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        """Returns tensors with 0 tokens. Their `empty_like` makes larger ones."""
        nothing = torch.empty(0, hidden_size, dtype=dtype, device=device)
        return IntermediateTensors(nothing, nothing)
