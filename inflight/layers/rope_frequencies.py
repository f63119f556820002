"""`head_frequencies`: the angle per position of each pair that is rotated.

Source of the formulas: transformers. For contexts longer than those in training, the frequencies are scaled in one of four
ways: "linear" (position interpolation, arXiv:2306.15595), "llama3" (Llama 3.1), "yarn" (arXiv:2309.00071), "longrope"
(arXiv:2402.13753).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inflight.config.mixers import RopeConfig


def head_frequencies(rope: RopeConfig | None, head_dim: int) -> Tensor:
    """Returns the radians per position of each dimension of a head, in two equal halves: float32 [head_dim]. They are 0 in
    dimensions that are not rotated."""
    inverse = torch.zeros(head_dim // 2, dtype=torch.float32, device="cpu")
    if rope is not None:
        rotary_dim = rope.rotary_dim or head_dim
        found = inverse_frequencies(rope, head_dim if rope.kind == "proportional" else rotary_dim)
        inverse[: rotary_dim // 2] = found[: rotary_dim // 2]
    return torch.cat((inverse, inverse))


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Returns the radians per position of each pair: float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    inverse: Tensor = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return inverse
    if rope.kind in ("linear", "proportional"):
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32, device="cpu") * rope.theta**exponents)
    assert rope.kind == "yarn", rope.kind
    return _yarn(inverse, rope, rotary_dim)


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """The frequencies of long wavelengths are divided by the factor, those of short wavelengths are kept, and between the two
    the result is a weighted mean."""
    wavelength = 2 * math.pi / inverse
    rotations = rope.original_max_position_embeddings / wavelength  # in the context the model was trained on
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * inverse / rope.factor + keep * inverse


def _yarn(inverse: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """The same as `_llama3`, but the weight of the mean is linear in the index of the pair."""

    def pair_with(num_rotations: float) -> float:
        """The (fractional) index of the pair that makes `num_rotations` turns in the context the model was trained on."""
        length = rope.original_max_position_embeddings
        ratio = length / (num_rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = pair_with(rope.beta_fast)
    high = pair_with(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001  # so that nothing is divided by zero
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return inverse / rope.factor * interpolate + inverse * (1 - interpolate)
