"""`RotaryEmbedding`: rotates pairs (i, i + head_dim / 2) of each head by an angle that grows with the position.

Source: RoFormer (arXiv:2104.09864), in the half-split form of GPT-NeoX. For contexts longer than those in training, the
frequencies (the angle per position) can be scaled in four ways, with the formulas of transformers: "linear" (position
interpolation, arXiv:2306.15595), "llama3" (Llama 3.1), "yarn" (arXiv:2309.00071) and "longrope" (arXiv:2402.13753).

Some families rotate only a part of each head, or other pairs. `row_order` gives an order of the dimensions in which the pairs
are (i, i + head_dim / 2). The rows of the projections of queries and keys get this order when they are loaded, so no kernel
needs to know. Their products stay the same, because queries and keys have the same order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from inflight.attention.backend import Rotation
from inflight.config.architecture import RopeConfig
from inflight.layers.context import LayerContext


class RotaryEmbedding(nn.Module):
    """All layers of a stage with equal `RopeConfig` share one object. Without a RopeConfig, all angles are 0: the rotation
    changes nothing. Each step computes the angles of its tokens in float32, which takes about 10 us. So no table
    for every position of the longest context is needed."""

    def __init__(self, rope: RopeConfig | None, head_dim: int, context: LayerContext) -> None:
        super().__init__()
        self.dtype, self.ops = context.dtype, context.ops
        self.attention_factor = 1.0 if rope is None else rope.attention_factor
        inverse = torch.zeros(head_dim // 2, dtype=torch.float32, device="cpu")
        if rope is not None:
            rotary_dim = rope.rotary_dim or head_dim
            found = inverse_frequencies(rope, head_dim if rope.kind == "proportional" else rotary_dim)
            inverse[: rotary_dim // 2] = found[: rotary_dim // 2]
        self.query_beta = None if rope is None else rope.query_beta
        self.original_length = 1 if rope is None else rope.original_max_position_embeddings
        self.frequencies = torch.cat((inverse, inverse)).to(context.device)  # [head_dim]

    def forward(self, positions: Tensor) -> Rotation:
        """positions [num_tokens] -> the rotation that each layer applies to its queries and keys."""
        cos, sin = self.ops.cos_and_sin(positions, self.frequencies, self.attention_factor, self.dtype)
        query_scale: Tensor | None = None
        if self.query_beta is not None:
            periods = (positions // self.original_length).to(torch.float32)
            query_scale = periods.log1p_().mul_(self.query_beta).add_(1.0).unsqueeze(1)
        return Rotation(cos, sin, self.ops, query_scale)


def row_order(rope: RopeConfig | None, head_dim: int) -> Tensor | None:
    """Returns the dimensions of a head in the checkpoint, in the order in which the pairs of `rope` are (i, i + head_dim / 2).
    First come the pairs that are rotated. None: the order in the checkpoint is right."""
    if rope is None or rope.kind == "proportional" or (not rope.interleaved and rope.rotary_dim in (None, head_dim)):
        return None
    rotary_dim = rope.rotary_dim or head_dim
    rotated = torch.arange(rotary_dim, dtype=torch.int64, device="cpu")
    firsts, seconds = (rotated[::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    passed = (
        torch.arange(rotary_dim, head_dim, dtype=torch.int64, device="cpu").chunk(2)
        if rotary_dim < head_dim
        else (rotated[:0], rotated[:0])
    )
    return torch.cat((firsts, passed[0], seconds, passed[1]))


def repeat_order(order: Tensor, num_rows: int) -> Tensor:
    """Returns the order of `num_rows` rows in which the rows of each head have the order `order`."""
    starts = torch.arange(0, num_rows, len(order), dtype=torch.int64, device="cpu")
    return (starts[:, None] + order).flatten()


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
        return head_dim * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # so that nothing is divided by zero
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return inverse / rope.factor * interpolate + inverse * (1 - interpolate)
