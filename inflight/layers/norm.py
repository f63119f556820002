"""`RMSNorm` over the hidden size. qk_norm.py has the norms of queries and keys.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
"""

import torch
from torch import Tensor, nn

from inflight.layers.context import LayerContext
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class RMSNorm(Loadable):
    """RMSNorm over the last dimension, which has `size` elements. `offset` is added to the weights of the checkpoint."""

    def __init__(self, size: int, eps: float, context: LayerContext, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=context.dtype, device=context.device), False)
        self.eps, self.offset = eps, offset
        self.ops = context.ops

    def weight_slots(self, prefix: str) -> WeightSlots:
        weight = self.weight.data
        yield (
            f"{prefix}.weight",
            WeightSlot(shape=(len(weight),), destination=weight, is_scale=True, offset=self.offset),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum."""
        return self.ops.add_and_rms_norm(x, residual, self.weight, self.eps)
