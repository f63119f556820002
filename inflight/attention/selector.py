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

FLOAT8 = torch.float8_e4m3fn
MAX_TRITON_HEAD_DIM = 256  # tiles of more do not fit registers


def get_backend(
    device_kind: str,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    *,
    name: str = "auto",
    num_multiprocessors: int = 0,
    max_shared_bytes: int = 0,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """A fresh backend for `device_kind`: "cpu", where plain torch serves what the C++ kernel does not, or "cuda".

    Args:
        name: "auto", or for "cuda" one of "triton" and "flashinfer". "auto" is Triton there.
        num_multiprocessors, max_shared_bytes: of the GPU, see `Accelerator`.
        batch_invariant: the Triton backend's; the others are what they are.

    Raises:
        ConfigError: nothing serves this shape, or these dtypes, here; or FlashInfer was asked for and is not installed.
    """
    assert head_dim > 0, f"head_dim is {head_dim}"
    assert dtype.is_floating_point, f"{dtype} is no dtype for attention"
    if device_kind == "cuda":
        return _gpu_backend(
            *(name, head_dim, dtype, kv_cache_dtype, num_multiprocessors, max_shared_bytes, batch_invariant)
        )
    if name != "auto":
        raise ConfigError(f"attention_backend={name!r} is for device='cuda', here {device_kind!r}; use 'auto'")
    if CpuPagedBackend.supports(head_dim, block_size, dtype, kv_cache_dtype):
        kernels = load_kernels()
        if kernels is not None:
            return CpuPagedBackend(kernels)
    if kv_cache_dtype != dtype:
        raise ConfigError(
            f"kv_cache_dtype={_name(kv_cache_dtype)!r} needs the C++ kernels, a head dimension (here "
            f"{head_dim}) that is a multiple of {HEAD_DIM_MULTIPLE} and at most {MAX_INT8_HEAD_DIM}, and a block_size (here "
            f"{block_size}) that is a multiple of {BLOCK_SIZE_MULTIPLE}; use 'auto', the model's dtype"
        )
    return TorchSdpaBackend(torch.device(device_kind))


def _gpu_backend(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    num_multiprocessors: int,
    max_shared_bytes: int,
    batch_invariant: bool,
) -> AttentionBackend:
    device = torch.device("cuda")
    if name == "flashinfer":
        if kv_cache_dtype != dtype:
            raise ConfigError(
                f"kv_cache_dtype={_name(kv_cache_dtype)!r} needs attention_backend='triton'; or use 'auto', the model's dtype"
            )
        from inflight.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(device)
    if name not in ("auto", "triton"):
        raise ConfigError(f"attention_backend is {name!r}; it is one of 'auto', 'triton' and 'flashinfer'")
    if kv_cache_dtype not in (dtype, FLOAT8):
        raise ConfigError(
            f"kv_cache_dtype={_name(kv_cache_dtype)!r} is not for device='cuda'; use 'fp8', or 'auto', the model's dtype"
        )
    if head_dim % 2 or head_dim > MAX_TRITON_HEAD_DIM:
        raise ConfigError(
            f"the model's head dimension is {head_dim}; attention on a GPU takes even ones up to {MAX_TRITON_HEAD_DIM}"
        )
    assert num_multiprocessors > 0, "of a GPU"
    from inflight.attention.triton_paged import TritonPagedBackend

    return TritonPagedBackend(
        device,
        num_multiprocessors=num_multiprocessors,
        max_shared_bytes=max_shared_bytes,
        batch_invariant=batch_invariant,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
