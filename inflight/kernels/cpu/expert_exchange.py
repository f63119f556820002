"""Mixtures of experts by the C++ kernels, if other ranks have some of the experts (expert_exchange.cpp)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.functions import ExpertExchange
from inflight.kernels.cpu.recording import KernelLibrary


def exchange_experts(
    kernels: KernelLibrary,
    experts: CpuExperts,
    exchange: ExpertExchange,
    run: Callable[[Callable[[], int]], None],
    hidden: Tensor,
    choices: Tensor,
) -> Tensor:
    """As `CpuExperts.__call__`. All ranks must call this, and those of a replica with the same rows.

    Args:
        exchange: the memory of the ranks, which fits the layer.
        run: makes the call, which returns 0 or how the group has ended, and raises this as an error.
    """
    experts.check(hidden, choices)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu")
    arguments = hidden.data_ptr(), hidden.stride(0), choices.data_ptr(), out.data_ptr(), len(hidden)
    run(partial(kernels.inflight_exchange_experts, *arguments, experts.layer, exchange))
    return out
