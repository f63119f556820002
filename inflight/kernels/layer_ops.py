"""`LayerOps`: the interface of norms and rotary embedding, and `TorchLayerOps`, their implementation in plain torch.

Norms are computed in float32. Plain torch rounds where transformers rounds: before the multiplication by the weight, and after
each half of a rotation. Kernels round once, at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LayerOps(ABC):
    """The steps between matrix products. Stateless; any thread may call it. Rows may be strided; the elements of a row are
    contiguous."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [num_rows, size], weight [size] -> x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)."""

    @abstractmethod
    def add_and_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds `delta` to `residual` in place and returns the norm of the sum. Both [num_rows, size]."""

    @abstractmethod
    def norm_and_rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """Computes the RMSNorm of each head, if there is a weight. Then returns `head * cos + swapped * sin`, where `swapped`
        is the head with its two halves exchanged.

        heads [num_tokens, num_heads, head_dim], weight [num_heads, head_dim], cos and sin [num_tokens, head_dim] (sin
        includes the sign of the rotation). The result may be `heads` itself, changed.
        """

    def cos_and_sin(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns the arguments `cos` and `sin` of `norm_and_rotate`. An angle is a position times a frequency; its cosine and
        signed sine are multiplied by `scale`.

        positions: integers [num_tokens]. frequencies: float32 [head_dim], the same in both halves. Angles are float32; cosines
        and sines are rounded once. This implementation is in plain torch.
        """
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        cos, sin = angles.cos(), angles.sin_()
        sin[:, : len(frequencies) // 2].neg_()
        if scale != 1.0:
            cos, sin = cos.mul_(scale), sin.mul_(scale)
        return cos.to(dtype), sin.to(dtype)


class TorchLayerOps(LayerOps):
    """The implementation in plain torch, for every device and dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def add_and_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(delta), weight, eps)

    def norm_and_rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        if weight is not None:
            heads = _rms_norm(heads, weight, eps)
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return torch.addcmul(heads * cos.unsqueeze(1), swapped, sin.unsqueeze(1))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # `F.rms_norm` is not used: on a CPU it calls eleven torch operations (here: eight), and it rounds in another place.
    wide = x.to(torch.float32, copy=True)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight)
