"""`IntermediateTensors`: the hidden states that one pipeline stage sends to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """Tensors with a row for each token, contiguous, in the engine's dtype.

    `delta` is the output of the MLP in the stage's last layer. The norm in the next layer adds `delta` to `residual`, just as
    between two layers of one stage. Both are [num_tokens, hidden_size]. `captured`: see `ModelStep`.
    """

    delta: Tensor
    residual: Tensor
    captured: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Those that there are, in the order of the fields."""
        return [self.delta, self.residual, *([] if self.captured is None else [self.captured])]

    def empty_like(self, num_tokens: int) -> IntermediateTensors:
        """Memory for `num_tokens` tokens, with undefined contents."""
        return IntermediateTensors(*(tensor.new_empty(num_tokens, tensor.shape[1]) for tensor in self.tensors()))

    def padded(self, num_tokens: int) -> IntermediateTensors:
        """Returns tensors for `num_tokens` tokens: first these tokens, then undefined contents."""
        if num_tokens == len(self.delta):
            return self
        padded = self.empty_like(num_tokens)
        for tensor, longer in zip(self.tensors(), padded.tensors(), strict=True):
            longer[: len(tensor)] = tensor
        return padded

    def first(self, num_tokens: int) -> IntermediateTensors:
        """Views of the first tokens."""
        return IntermediateTensors(*(tensor[:num_tokens] for tensor in self.tensors()))

    @staticmethod
    def template(
        hidden_size: int, dtype: torch.dtype, device: torch.device, num_captured: int = 0
    ) -> IntermediateTensors:
        """Returns tensors with 0 tokens. Their `empty_like` makes larger ones. `num_captured`: of layers."""
        nothing, captured = (
            torch.empty(0, size, dtype=dtype, device=device) for size in (hidden_size, num_captured * hidden_size)
        )
        return IntermediateTensors(nothing, nothing, captured if num_captured else None)
