"""Gates: the numbers by which kernels know their activations, and the product with a gate in plain torch."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.config.architecture import GELU, GELU_TANH, RELU, SIGMOID, SILU, SWIGLU_OAI
from inflight.kernels.swiglu_oai import swiglu_oai

# As in kernels.h and in the Triton kernels. 0: there is no gate.
GATE_CODES = {None: 0, SILU: 1, GELU_TANH: 2, SIGMOID: 3, SWIGLU_OAI: 4, GELU: 5, RELU: 6}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    SILU: F.silu,
    GELU_TANH: partial(F.gelu, approximate="tanh"),
    SIGMOID: torch.sigmoid,
    GELU: F.gelu,
    RELU: torch.relu,
}
MLP_GATES = (SILU, GELU_TANH, SWIGLU_OAI, GELU)  # those of `multiply_gate`


def multiply_gate(features: Tensor, gate: str) -> Tensor:
    """Returns gate(first half of the features) * second half (arXiv:2002.05202). `gate` is one of `MLP_GATES`."""
    first, second = features.chunk(2, dim=-1)
    if gate == SWIGLU_OAI:
        return swiglu_oai(first, second)
    return ACTIVATIONS[gate](first).mul_(second)
