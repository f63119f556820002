"""`RotaryEmbedding`: rotates pairs (i, i + head_dim / 2) of each head by an angle that grows with the position.

Source: RoFormer (arXiv:2104.09864), in the half-split form of GPT-NeoX.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.attention.rotation import Rotation
from inflight.config.architecture import RopeConfig
from inflight.kernels.selector import select_layer_ops
from inflight.layers.rotary_frequencies import inverse_frequencies


class RotaryEmbedding(nn.Module):
    """All layers share one object. Angles are computed in float32 for the tokens of each step (about 10 us). So there is no
    table for every position of the longest context."""

    def __init__(self, rope: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        self.ops = select_layer_ops(device, dtype)
        self.attention_factor = rope.attention_factor
        inverse = inverse_frequencies(rope, head_dim)
        self.frequencies = torch.cat((inverse, inverse)).to(device)  # [head_dim]

    def forward(self, positions: Tensor) -> Rotation:
        """positions [num_tokens] -> the rotation that each layer applies to its queries and keys."""
        cos, sin = self.ops.cos_and_sin(positions, self.frequencies, self.attention_factor, self.dtype)
        return Rotation(cos, sin, self.ops)
