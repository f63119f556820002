"""SiLU-and-multiply, the gate of the MLP (arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 * size] -> silu(gate) * up [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
