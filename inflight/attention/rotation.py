"""`Rotation`: applies the rotary position embedding to a step's queries and keys. Some models norm them first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inflight.kernels.layer_ops import LayerOps


class HeadNorm(Protocol):
    """An RMSNorm of each query head and key head over its head_dim elements (`layers.norm.QKNorm`)."""

    @property
    def weight(self) -> Tensor:
        """[num_heads + num_kv_heads, head_dim], queries first."""

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of one step's tokens: [num_tokens, head_dim] in the engine's dtype, for all layers.

    In the first half of the head, `sin` has the negated sines, because the rotation subtracts there.
    """

    cos: Tensor
    sin: Tensor
    ops: LayerOps

    def apply(self, heads: Tensor, norm: HeadNorm | None) -> Tensor:
        """Returns `heads` after the norm (if there is one) and the rotation. May overwrite `heads`, which has the shape
        [num_tokens, num_heads + num_kv_heads, head_dim], queries first."""
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return self.ops.norm_and_rotate(heads, weight, eps, self.cos, self.sin)
