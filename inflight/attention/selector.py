"""`get_backend`: chooses the attention backend for a device."""

from collections.abc import Collection

import torch

from inflight.attention.backend import AttentionBackend
from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.errors import ConfigError
from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.cpu.limits import BLOCK_SIZE_MULTIPLE, HEAD_DIM_MULTIPLE, MAX_INT8_HEAD_DIM

FLOAT8 = torch.float8_e4m3fn
MAX_TRITON_HEAD_DIM = 512  # larger tiles do not fit the registers


def get_backend(
    device_kind: str,
    head_dims: Collection[int],
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    *,
    num_multiprocessors: int = 0,
    max_shared_bytes: int = 0,
) -> AttentionBackend:
    """Returns a new backend. If `device_kind` is "cuda", the backend uses Triton. If it is "cpu", the backend uses the C++
    kernel, or plain torch if this kernel is not installed or does not support the model's shapes.

    Args:
        head_dims: the sizes of heads of the model's layers.
        num_multiprocessors, max_shared_bytes: properties of the GPU, see `Accelerator`.

    Raises:
        ConfigError: no backend supports this head dimension, block size or KV cache dtype on this device.
    """
    assert head_dims and min(head_dims) > 0, f"head_dims are {head_dims}"
    assert dtype.is_floating_point, f"attention needs a floating-point dtype, not {dtype}"
    if device_kind == "cuda":
        return _gpu_backend(head_dims, dtype, kv_cache_dtype, num_multiprocessors, max_shared_bytes)
    if all(CpuPagedBackend.supports(each, block_size, dtype, kv_cache_dtype) for each in head_dims):
        kernels = load_kernels()
        if kernels is not None:
            return CpuPagedBackend(kernels)
    if kv_cache_dtype != dtype:
        raise ConfigError(
            f"kv_cache_dtype={_name(kv_cache_dtype)!r} needs the C++ kernels, a head dimension (here {_listed(head_dims)}) "
            f"that is a multiple of {HEAD_DIM_MULTIPLE} and at most {MAX_INT8_HEAD_DIM}, and a block_size (here "
            f"{block_size}) that is a multiple of {BLOCK_SIZE_MULTIPLE}; otherwise use 'auto' (the model's dtype)"
        )
    return TorchSdpaBackend()


def _gpu_backend(
    head_dims: Collection[int],
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    num_multiprocessors: int,
    max_shared_bytes: int,
) -> AttentionBackend:
    if kv_cache_dtype not in (dtype, FLOAT8):
        raise ConfigError(
            f"kv_cache_dtype={_name(kv_cache_dtype)!r} is not for device='cuda'; use 'fp8', or 'auto' (the model's dtype)"
        )
    if any(each % 2 or each > MAX_TRITON_HEAD_DIM for each in head_dims):
        raise ConfigError(
            f"the model's head dimension is {_listed(head_dims)}; attention on a GPU supports even numbers up to "
            f"{MAX_TRITON_HEAD_DIM}"
        )
    assert num_multiprocessors > 0, "for a GPU, num_multiprocessors must be given"
    from inflight.attention.triton_paged import TritonPagedBackend

    return TritonPagedBackend(
        torch.device("cuda"), num_multiprocessors=num_multiprocessors, max_shared_bytes=max_shared_bytes
    )


def _listed(head_dims: Collection[int]) -> str:
    return " and ".join(map(str, head_dims))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
