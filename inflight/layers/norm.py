"""`RMSNorm` over the hidden size, and the weights of the norm on every query and key head.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.layers.context import LayerContext
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class RMSNorm(Loadable):
    """RMSNorm over the last dimension, which has `size` elements."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=context.dtype, device=context.device), False)
        self.eps = eps
        self.ops = context.ops

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield f"{prefix}.weight", WeightSlot(shape=(len(self.weight),), destination=self.weight.data, is_scale=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum."""
        return self.ops.add_and_rms_norm(x, residual, self.weight, self.eps)


class QKNorm(Loadable):
    """The weights of an RMSNorm over each query and key head: one row of head_dim weights per head. The attention backend
    computes the norm, before it rotates the heads.

    The checkpoint has one weight for all query heads and one for all key heads. Their names, `q_norm` and `k_norm`, replace the
    name of this layer.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        ones = torch.ones(num_heads + num_kv_heads, head_dim, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(ones, False)
        self.num_heads = num_heads
        self.eps = eps

    def weight_slots(self, prefix: str) -> WeightSlots:
        rows, block = self.weight.data, prefix.rpartition(".")[0]
        for name, row in (("q_norm", rows[0]), ("k_norm", rows[self.num_heads])):
            yield f"{block}.{name}.weight", WeightSlot(shape=tuple(row.shape), destination=row, is_scale=True)

    def finish_loading(self) -> None:
        rows = self.weight.data
        rows[1 : self.num_heads] = rows[0]
        rows[self.num_heads + 1 :] = rows[self.num_heads]
