"""`Rotation`: rotary position embedding of a step's queries and keys, with the norm that some models apply before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inflight.kernels.layer_ops import LayerOps


class HeadNorm(Protocol):
    """An RMSNorm of every query and key head, each over its head_dim (`layers.norm.QKNorm`)."""

    @property
    def weight(self) -> Tensor:
        """[num_heads + num_kv_heads, head_dim], queries first."""

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of one step's tokens: [num_tokens, head_dim] in the engine's dtype, for all layers.

    `sin` includes the sign of the rotation: it is negated in the first half of the head.
    """

    cos: Tensor
    sin: Tensor
    ops: LayerOps

    def apply(self, heads: Tensor, norm: HeadNorm | None) -> Tensor:
        """Norms and rotates heads [num_tokens, num_heads + num_kv_heads, head_dim], queries first. May change `heads`."""
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return self.ops.norm_and_rotate(heads, weight, eps, self.cos, self.sin)
