"""Which attention backend serves a device."""

from __future__ import annotations

import torch

from inflight.attention.backend import AttentionBackend
from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.kernels.cpu.library import load_kernels


def get_backend(device_kind: str, head_dim: int, block_size: int, dtype: torch.dtype) -> AttentionBackend:
    """A fresh backend for `device_kind` ("cpu"). Plain torch serves every head dimension, block size and floating dtype."""
    assert head_dim > 0, f"head_dim is {head_dim}"
    assert dtype.is_floating_point, f"{dtype} is no dtype for attention"
    if device_kind == "cpu" and CpuPagedBackend.supports(head_dim, block_size, dtype):
        kernels = load_kernels()
        if kernels is not None:
            return CpuPagedBackend(kernels)
    return TorchSdpaBackend(torch.device(device_kind))
