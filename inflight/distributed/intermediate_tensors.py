"""`IntermediateTensors`: what one pipeline stage hands to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """Both [num_tokens, hidden_size], contiguous, in the engine's dtype.

    `delta` is what the last layer's MLP left to be added to `residual`; the next layer's norm adds it, as within a stage.
    """

    delta: Tensor
    residual: Tensor

    def empty_like(self, num_tokens: int) -> IntermediateTensors:
        """Memory for as many tokens, its contents undefined."""
        shape = (num_tokens, self.delta.shape[1])
        return IntermediateTensors(self.delta.new_empty(shape), self.residual.new_empty(shape))

    @staticmethod
    def template(hidden_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        """Tensors of no tokens, for `empty_like`."""
        nothing = torch.empty(0, hidden_size, dtype=dtype, device=device)
        return IntermediateTensors(nothing, nothing)
