"""`TritonLayerOps`: RMSNorm and the angles of rotary embedding by Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.layer_ops import TorchLayerOps
from inflight.kernels.triton.norm import rms_norm
from inflight.kernels.triton.rotary import cos_and_sin


class TritonLayerOps(TorchLayerOps):
    """Norms are rounded once. The Triton attention backend rotates heads itself. For other backends, `TorchLayerOps` does."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, None, weight, eps)

    def add_and_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(delta, residual, weight, eps)

    def cos_and_sin(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return cos_and_sin(positions, frequencies, scale, dtype)
