"""Rotary embedding with three positions for each token: frame, row and column, as tokens of images have them.

Each frequency is multiplied by one of the three positions. Tokens of a text have three equal positions, so their rotation is
the usual one. Sources: Qwen2-VL (arXiv:2409.12191), where neighbouring frequencies have the same position, and Qwen3-VL
(arXiv:2511.21631), where the positions take turns.
"""

import torch
from torch import Tensor

from inflight.attention.backend import Rotation
from inflight.config.mixers import RopeConfig
from inflight.kernels.layer_ops import turns
from inflight.layers.context import LayerContext
from inflight.layers.rotary import RotaryEmbedding


class SectionedRotary(RotaryEmbedding):
    """The rotary embedding of a model with `mrope_section`."""

    def __init__(self, rope: RopeConfig, head_dim: int, context: LayerContext) -> None:
        super().__init__(rope, head_dim, context)
        assert self.query_beta is None, "no family has both"
        self.position_of = position_of_frequencies(rope, head_dim).to(context.device)

    def forward(self, positions: Tensor) -> Rotation:
        """positions: integers [num_tokens], or [3, num_tokens]."""
        if positions.dim() == 1:
            return super().forward(positions)
        of_each = positions[self.position_of].T.contiguous()  # [num_tokens, head_dim]
        cos, sin = cos_and_sin(of_each, self.frequencies, self.attention_factor, self.dtype)
        return Rotation(cos, sin, self.ops)


def make_rotary(rope: RopeConfig | None, head_dim: int, context: LayerContext) -> RotaryEmbedding:
    if rope is not None and rope.mrope_section:
        return SectionedRotary(rope, head_dim, context)
    return RotaryEmbedding(rope, head_dim, context)


def position_of_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Which of the three positions each frequency is multiplied by: int64 [head_dim], in two equal halves."""
    found = torch.zeros(head_dim // 2, dtype=torch.int64, device="cpu")
    if rope.mrope_interleaved:
        num_rotated = (rope.rotary_dim or head_dim) // 2
        for position in (1, 2):
            found[: min(3 * rope.mrope_section[position], num_rotated)][position::3] = position
    else:
        first = 0
        for position, count in enumerate(rope.mrope_section):
            found[first : first + count] = position
            first += count
    return torch.cat((found, found))


def cos_and_sin(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `LayerOps.cos_and_sin`, in plain torch, with a position for each frequency: integers [num_tokens, head_dim]."""
    return turns(positions.to(torch.float32) * frequencies, frequencies, scale, dtype)
