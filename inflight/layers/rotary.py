"""`RotaryEmbedding`: rotates pairs (i, i + head_dim / 2) of each head by an angle that grows with the position.

Source: RoFormer (arXiv:2104.09864), in the half-split form of GPT-NeoX. Frequencies are scaled as transformers scales
them: "linear" (position interpolation, arXiv:2306.15595), "llama3" (Llama 3.1), "yarn" (arXiv:2309.00071).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from inflight.attention.rotation import Rotation
from inflight.config.architecture import RopeConfig
from inflight.kernels.selector import select_layer_ops


class RotaryEmbedding(nn.Module):
    """One for all layers. Angles are computed in float32 for the tokens of each step (about 10 us), so that no table as
    long as the longest context is held."""

    def __init__(self, rope: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        self.ops = select_layer_ops(device, dtype)
        self.attention_factor = rope.attention_factor
        inverse = inverse_frequencies(rope, head_dim)
        self.frequencies = torch.cat((inverse, inverse)).to(device)  # [head_dim]

    def forward(self, positions: Tensor) -> Rotation:
        """positions [num_tokens] -> what each layer applies to its queries and keys."""
        cos, sin = self.ops.cos_and_sin(positions, self.frequencies, self.attention_factor, self.dtype)
        return Rotation(cos, sin, self.ops)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair: float32 [head_dim / 2], in falling order."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse: Tensor = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return inverse
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    assert rope.kind == "yarn", rope.kind
    return _yarn(inverse, rope, head_dim)


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are interpolated, short ones are kept, and wavelengths in between are blended."""
    wavelength = 2 * math.pi / inverse
    rotations = rope.original_max_position_embeddings / wavelength  # in the context the model was trained on
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * inverse / rope.factor + keep * inverse


def _yarn(inverse: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """As `_llama3`, but blended linearly over the index of the pair."""

    def pair_with(num_rotations: float) -> float:
        """The (fractional) index of the pair that makes `num_rotations` turns in the context the model was trained on."""
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / rope.factor * interpolate + inverse * (1 - interpolate)
