"""`LayerOps`: the interface of norms and rotary embedding, and `TorchLayerOps`, their implementation in plain torch.

Norms are computed in float32. In norms, `TorchLayerOps` rounds in the same places as Hugging Face transformers: before and
after the multiplication by the weight. In rotations, transformers rounds both products and their sum; `TorchLayerOps` rounds
only the first product and the sum, because `addcmul` keeps the second product exact. The C++ and Triton kernels round once, at
the end.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from inflight.kernels.gate import ACTIVATIONS


class LayerOps(ABC):
    """The operations between matrix products. Stateless; any thread may call them. The rows of a tensor may be strided, but the
    elements of a row are contiguous."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [num_rows, size], weight [size] -> x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)."""

    @abstractmethod
    def add_and_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds `delta` to `residual` in place and returns the norm of the sum. All three tensors are [num_rows, size]."""

    @abstractmethod
    def norm_and_rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """If there is a weight, replaces each head by its RMSNorm. Then returns `head * cos + swapped * sin`, where `swapped`
        is the head with its two halves exchanged.

        heads [num_tokens, num_heads, head_dim], weight [num_heads, head_dim], cos and sin [num_tokens, head_dim]. The first
        half of sin is negated. The result may be the tensor `heads` itself, changed in place.
        """

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """Replaces each head by its RMSNorm, in place. The shapes are those of `norm_and_rotate`."""
        heads.copy_(_rms_norm(heads, weight, eps))

    def multiply_activation(self, x: Tensor, gate: Tensor, activation: str) -> None:
        """Multiplies x [num_rows, size] by activation(gate) in place. `activation` is SILU, GELU_TANH or SIGMOID."""
        x.mul_(ACTIVATIONS[activation](gate))

    def add_and_scale(self, x: Tensor, delta: Tensor | None, factor: Tensor | None) -> None:
        """Computes x = (x + delta) * factor in place. x and delta are [num_rows, size]. `factor` is float32: [1], or
        [num_rows, 1]. None: nothing is added, or the sum is not multiplied."""
        if delta is not None:
            x.add_(delta)
        if factor is not None:
            x.copy_(x * factor)

    def copy_heads(self, x: Tensor, out: Tensor) -> None:
        """Copies x to `out`, both [num_tokens, num_heads, size], with any strides of tokens and heads."""
        out.copy_(x)

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [num_tokens, size], rows: int64 [num_rows] -> [num_rows, size], in new memory."""
        return x[rows]

    def cos_and_sin(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns the arguments `cos` and `sin` of `norm_and_rotate`. An angle is a position times a frequency. Cosines and
        sines are multiplied by `scale`, but not in dimensions whose frequency is 0: these are not rotated.

        positions: integers [num_tokens]. frequencies: float32 [head_dim]; its two halves are equal. Angles are float32. Cosines
        and sines are computed in float32 and rounded once, to `dtype`. This implementation is in plain torch.
        """
        return turns(positions.to(torch.float32).unsqueeze(-1) * frequencies, frequencies, scale, dtype)


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


def turns(angles: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns what `LayerOps.cos_and_sin` does, for angles in float32 [num_tokens, head_dim]."""
    factors = torch.full_like(frequencies, scale).masked_fill_(frequencies == 0, 1.0)
    # Not `cos` and `sin`: on a CPU torch divides even a few numbers among all threads, and waits for the slowest one. Beside a
    # busy program, that takes a time slice of the system, 4 to 8 ms, in each step.
    cos, sin = torch.view_as_real(torch.polar(factors.expand_as(angles), angles)).unbind(-1)
    sin[:, : len(frequencies) // 2].neg_()
    return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # `F.rms_norm` is not used: it calls eleven torch operations on a CPU (this code: eight), and rounds in another place.
    wide = x.to(torch.float32, copy=True)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight)
