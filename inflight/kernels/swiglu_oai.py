"""`swiglu_oai`: the gate of gpt-oss's experts."""

import torch
from torch import Tensor

# All published models have these two numbers (swiglu_alpha and swiglu_limit in config.json). The C++ kernels have them, too.
ALPHA = 1.702
LIMIT = 7.0


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(ALPHA * gate) * (up + 1), after gate was limited from above, and up from both sides."""
    gate = gate.clamp(max=LIMIT)
    up = up.clamp(-LIMIT, LIMIT)
    return torch.sigmoid(gate * ALPHA).mul_(gate).mul_(up + 1)
