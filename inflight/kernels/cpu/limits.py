"""What the C++ kernels support. Each limit is stated here, once, for the code that chooses a kernel and the code that calls it.

The sizes of a model are checked when a layer is made or bound to its cache. `require_supported` raises `ConfigError`.
call_checks.py checks that the tensors of each call fit together.
"""

import functools

import torch

from inflight.errors import ConfigError
from inflight.kernels.cpu.functions import DTYPES
from inflight.kernels.gated_delta import GatedDeltaShape
from inflight.kernels.quantized_weight import GROUP_SIZE_MULTIPLE

HEAD_DIM_MULTIPLE = BLOCK_SIZE_MULTIPLE = 16  # the number of lanes of the widest vectors
MAX_INT8_HEAD_DIM = 512  # a sum of 512 products of int8 and int16 fits 32 bits
KEY_DIM_MULTIPLE, VALUE_DIM_MULTIPLE = 16, 32  # of the gated delta rule: a vector, and a tile of two vectors
CHANNEL_MULTIPLE = 16  # of short convolutions
MAX_CONVOLUTION = 8  # tokens that a convolution covers, `kMaxConvolution` of kernels.h
MAX_EXPERTS = 1024  # of a layer, `kMostExperts` of kernels.h
IN_FEATURES_MULTIPLE = 4  # one instruction multiplies four bytes
MAX_INTEGER_IN_FEATURES = 2**31 // (255 * 127)  # the sum of so many products of a uint8 and an int8 fits an int32


def require_supported(problem: str | None) -> None:
    """
    Args:
        problem: the result of a function below: why the kernel does not support a layer, or None.

    Raises:
        ConfigError: there is a problem.
    """
    if problem is not None:
        raise ConfigError(problem)


@functools.cache
def require_attention(
    head_dim: int, value_dim: int | None, block_size: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype
) -> None:
    """Requires that `attention_problem` finds no problem. Each call of the kernel asks, and a layer's sizes never change, so
    sizes without a problem are kept."""
    require_supported(attention_problem(head_dim, value_dim, block_size, dtype, kv_cache_dtype))


def attention_problem(
    head_dim: int, value_dim: int | None, block_size: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype
) -> str | None:
    """Of attention.cpp. `value_dim`: as in `AttentionParams`."""
    kernel = "the C++ attention kernel"
    if head_dim < 1 or head_dim % HEAD_DIM_MULTIPLE:
        return f"{kernel} needs heads whose size is a multiple of {HEAD_DIM_MULTIPLE}, not {head_dim}"
    if value_dim is not None and (value_dim % HEAD_DIM_MULTIPLE or not 0 < value_dim < head_dim):
        return (
            f"{kernel} needs values that are the first elements of the keys to have a size that is a multiple of "
            f"{HEAD_DIM_MULTIPLE} below that of the keys, {head_dim}, not {value_dim}"
        )
    if block_size < 1 or block_size % BLOCK_SIZE_MULTIPLE:
        return f"{kernel} needs a block_size that is a multiple of {BLOCK_SIZE_MULTIPLE}, not {block_size}"
    if dtype not in DTYPES or kv_cache_dtype not in (dtype, torch.int8):
        return (
            f"{kernel} computes in float32 or bfloat16, with a KV cache of the same dtype or int8, not in {dtype} with a KV "
            f"cache of {kv_cache_dtype}"
        )
    if kv_cache_dtype == torch.int8 and head_dim > MAX_INT8_HEAD_DIM:
        return f"{kernel} needs heads of at most {MAX_INT8_HEAD_DIM} elements for a KV cache of int8, not {head_dim}"
    return None


def gated_delta_problem(shape: GatedDeltaShape, dtype: torch.dtype) -> str | None:
    """Of gated_delta.cpp."""
    if (
        min(shape.num_key_heads, shape.key_dim, shape.value_dim, shape.num_value_heads) < 1
        or shape.key_dim % KEY_DIM_MULTIPLE
        or shape.value_dim % VALUE_DIM_MULTIPLE
        or shape.num_value_heads % shape.num_key_heads
        or not 1 <= shape.kernel_size <= MAX_CONVOLUTION
    ):
        return (
            f"the C++ kernel of the gated delta rule needs a key_dim that is a multiple of {KEY_DIM_MULTIPLE}, a value_dim "
            f"that is a multiple of {VALUE_DIM_MULTIPLE}, a number of value heads that is a multiple of that of key heads, and "
            f"a kernel_size from 1 to {MAX_CONVOLUTION}, not {shape}"
        )
    if dtype in DTYPES:
        return None
    return f"the C++ kernel of the gated delta rule needs float32 or bfloat16, not {dtype}"


def short_conv_problem(num_channels: int, kernel_size: int, dtype: torch.dtype) -> str | None:
    """Of short_conv.cpp."""
    if num_channels < 1 or num_channels % CHANNEL_MULTIPLE or not 1 <= kernel_size <= MAX_CONVOLUTION:
        return (
            f"the C++ kernel of short convolutions needs a number of channels that is a multiple of {CHANNEL_MULTIPLE} and a "
            f"kernel_size from 1 to {MAX_CONVOLUTION}, not {num_channels} channels and a kernel_size of {kernel_size}"
        )
    if dtype in DTYPES:
        return None
    return f"the C++ kernel of short convolutions needs float32 or bfloat16, not {dtype}"


def experts_problem(num_experts: int, top_k: int) -> str | None:
    """Of experts.cpp. `linear_problem` says which sizes an expert may have."""
    if not 1 <= top_k <= num_experts <= MAX_EXPERTS:
        return f"the C++ kernel of experts needs 1 to {MAX_EXPERTS} of them, not {num_experts}, of which {top_k} are chosen"
    return None


def linear_problem(in_features: int, *, group_size: int, bits: int) -> str | None:
    """Of linear.cpp and linear_pack.cpp. `bits` and `group_size`: as in `LinearWeight`; if a row is one group, its size is
    `in_features`."""
    kernel = "the C++ kernels of linear layers"
    if bits not in (4, 8, 16, 32):
        return f"{kernel} need weights of 4, 8, 16 or 32 bits, not {bits}"
    if in_features < 1 or in_features % IN_FEATURES_MULTIPLE:
        return (
            f"{kernel} need a number of input features that is a multiple of {IN_FEATURES_MULTIPLE}, not {in_features}"
        )
    if bits <= 8 and in_features > MAX_INTEGER_IN_FEATURES:
        return f"{kernel} need at most {MAX_INTEGER_IN_FEATURES} input features for integer weights, not {in_features}"
    is_one_group = group_size == in_features and bits != 4
    multiple = GROUP_SIZE_MULTIPLE.get(bits, 1)
    if not is_one_group and (group_size < 1 or group_size % multiple or in_features % group_size):
        return (
            f"{kernel} need groups whose size is a multiple of {multiple} that divides the {in_features} input "
            f"features, not {group_size}"
        )
    return None
