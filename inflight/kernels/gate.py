"""The gates of MLPs: the numbers by which kernels know them, and the product with a gate in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from inflight.config.architecture import GELU_TANH, SILU

# As in kernels.h and in the Triton kernels. 0: there is no gate.
GATE_CODES = {None: 0, SILU: 1, GELU_TANH: 2}


def multiply_gate(features: Tensor, gate: str) -> Tensor:
    """Returns gate(first half of the features) * second half (arXiv:2002.05202). `gate` is SILU or GELU_TANH."""
    first, second = features.chunk(2, dim=-1)
    return (F.silu(first) if gate == SILU else F.gelu(first, approximate="tanh")).mul_(second)
