"""`RMSNorm`, computed as transformers does: in float32, rounded to the engine's dtype before the weight multiplies.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.layers.weights import WeightSlot, WeightSlots


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / rms(x) over the last dimension, times `weight`, which broadcasts. `eps`: float32 scalar on the device.

    Seven calls instead of `F.rms_norm`'s one, which on a CPU makes eleven inside and rounds in another place.
    """
    wide = x.to(torch.float32, copy=True)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()  # mean of squares = norm^2 / dim
    return wide.mul_(scale).to(x.dtype).mul_(weight)


class RMSNorm(nn.Module):
    """Over the last `size` elements."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), False)
        self.eps = torch.tensor(eps, dtype=torch.float32, device=device)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield f"{prefix}.weight", WeightSlot(shape=(len(self.weight),), destination=self.weight.data, is_scale=True)

    def finish_loading(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum."""
        return rms_norm(residual.add_(x), self.weight, self.eps)


class QKNorm(nn.Module):
    """RMSNorm of every query and key head, each over its head_dim, in one go: one weight row a head.

    The checkpoint has one weight for all query heads (`q_norm`) and one for all key heads (`k_norm`).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device), False)
        self.num_heads = num_heads
        self.eps = torch.tensor(eps, dtype=torch.float32, device=device)

    def weight_slots(self, prefix: str) -> WeightSlots:
        rows = self.weight.data
        for name, row in (("q_norm", rows[0]), ("k_norm", rows[self.num_heads])):
            yield f"{prefix}.{name}.weight", WeightSlot(shape=tuple(row.shape), destination=row, is_scale=True)

    def finish_loading(self) -> None:
        rows = self.weight.data
        rows[1 : self.num_heads] = rows[0]
        rows[self.num_heads + 1 :] = rows[self.num_heads]

    def forward(self, heads: Tensor) -> Tensor:
        """heads [num_tokens, num_heads + num_kv_heads, head_dim], queries first -> as heads, contiguous."""
        return rms_norm(heads, self.weight, self.eps)
