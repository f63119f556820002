"""`RotaryEmbedding`: rotates pairs (i, i + head_dim / 2) of each head by an angle that grows with the position.

Source: RoFormer (arXiv:2104.09864), in the half-split form of GPT-NeoX. For contexts longer than those in training, the
frequencies (the angle per position) are scaled: rope_frequencies.py.

Some families rotate only a part of each head, or other pairs. `row_order` (sharding.py) gives an order of the dimensions in
which the pairs are (i, i + head_dim / 2). The rows of the projections of queries and keys get this order when they are loaded,
so no kernel needs to know. Their products stay the same, because queries and keys have the same order.
"""

import torch
from torch import Tensor, nn

from inflight.attention.backend import Rotation
from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.config.mixers import RopeConfig
from inflight.layers.context import LayerContext
from inflight.layers.rope_frequencies import head_frequencies

NUM_AHEAD = 32  # positions


class RotaryEmbedding(nn.Module):
    """All layers of a stage with equal `RopeConfig` share one object. Without a RopeConfig, all angles are 0: the rotation
    changes nothing. Each step computes the angles of its tokens in float32. So no table for every position of the longest
    context is needed.

    This is thirteen operations of torch. In a decode step they take 0.2 ms, because the weights have displaced everything from
    the processor's caches. So with the kernels of CPUs, a step of one token also computes the rotations of the next
    positions, for later steps. Only the thread that computes may use the object."""

    def __init__(self, rope: RopeConfig | None, head_dim: int, context: LayerContext) -> None:
        super().__init__()
        self.dtype, self.ops = context.dtype, context.ops
        self.rope = rope
        self.attention_factor = 1.0 if rope is None else rope.attention_factor
        self.query_beta = None if rope is None else rope.query_beta
        self.frequencies = head_frequencies(rope, head_dim).to(context.device)
        # of a few positions; None: steps of another backend may be recorded and replayed
        self._kept: dict[int, Rotation] | None = {} if isinstance(context.backend, CpuPagedBackend) else None

    def forward(self, positions: Tensor) -> Rotation:
        """positions [num_tokens] -> the rotation that each layer applies to its queries and keys."""
        if positions.shape[0] != 1 or self._kept is None:
            return self.compute(positions)
        position = int(positions)
        if position not in self._kept:
            several = torch.arange(position, position + NUM_AHEAD, dtype=positions.dtype, device="cpu")
            self._kept = dict(enumerate(self.compute(several).split(), position))
        return self._kept[position]

    def compute(self, positions: Tensor) -> Rotation:
        """The same, but nothing is kept."""
        if self.rope is None:
            ones = torch.ones(len(positions), len(self.frequencies), dtype=self.dtype, device=positions.device)
            return Rotation(ones, torch.zeros_like(ones), self.ops, changes_nothing=True)
        cos, sin = self.ops.cos_and_sin(positions, self.frequencies, self.attention_factor, self.dtype)
        query_scale: Tensor | None = None
        if self.query_beta is not None:
            periods = (positions // self.rope.original_max_position_embeddings).to(torch.float32)
            query_scale = periods.log1p_().mul_(self.query_beta).add_(1.0).unsqueeze(1)
        return Rotation(cos, sin, self.ops, query_scale)
