"""Which attention backend serves a device."""

from __future__ import annotations

import torch

from inflight.attention.backend import AttentionBackend
from inflight.attention.cpu_paged import (
    BLOCK_SIZE_MULTIPLE,
    HEAD_DIM_MULTIPLE,
    MAX_INT8_HEAD_DIM,
    CpuPagedBackend,
)
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.errors import ConfigError
from inflight.kernels.cpu.library import load_kernels


def get_backend(
    device_kind: str, head_dim: int, block_size: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype
) -> AttentionBackend:
    """A fresh backend for `device_kind` ("cpu"). Plain torch serves every head dimension, block size and floating dtype.

    Raises:
        ConfigError: `kv_cache_dtype` is not `dtype`, and the C++ kernel, which alone can quantise, does not serve here.
    """
    assert head_dim > 0, f"head_dim is {head_dim}"
    assert dtype.is_floating_point, f"{dtype} is no dtype for attention"
    if device_kind == "cpu" and CpuPagedBackend.supports(head_dim, block_size, dtype, kv_cache_dtype):
        kernels = load_kernels()
        if kernels is not None:
            return CpuPagedBackend(kernels)
    if kv_cache_dtype != dtype:
        raise ConfigError(
            f"kv_cache_dtype={str(kv_cache_dtype).removeprefix('torch.')!r} needs the C++ kernels, a head dimension (here "
            f"{head_dim}) that is a multiple of {HEAD_DIM_MULTIPLE} and at most {MAX_INT8_HEAD_DIM}, and a block_size (here "
            f"{block_size}) that is a multiple of {BLOCK_SIZE_MULTIPLE}; use 'auto', the model's dtype"
        )
    return TorchSdpaBackend(torch.device(device_kind))
