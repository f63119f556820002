"""The functions of kernels.h as ctypes sees them: the types of their arguments and results, and the structs that they take."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # `DType` of kernels.h


class AttentionStep(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the arrays behind its pointers alive."""

    _fields_ = (
        ("num_rows", c_int32),
        ("block_size", c_int32),
        ("sliding_window", c_int32),
        ("table_stride", c_int32),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("num_computed_tokens", c_void_p),
        ("block_table", c_void_p),
        ("state_bytes", c_int64),
        ("num_states", c_int32),
    )


class HeadLayout(ctypes.Structure):
    """The struct of this name in kernels.h."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_dim", c_int32),
        ("dtype", c_int32),
        ("cache_dtype", c_int32),
        ("block_stride", c_int64),
    )


class AttentionParams(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointer alive."""

    _fields_ = (("scale", c_float), ("soft_cap", c_float), ("sinks", c_void_p))


class LinearWeight(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("group_size", c_int64),
        ("scale", c_float),
        ("bits", c_int32),
        ("has_offsets", c_int32),
        ("gate", c_int32),
    )


class GatedDelta(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("num_key_heads", c_int64),
        ("num_value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("kernel_size", c_int64),
        ("block_stride", c_int64),
        ("inputs_offset", c_int64),
        ("conv_weight", c_void_p),
        ("rates", c_void_p),
        ("step_bias", c_void_p),
        ("norm_weight", c_void_p),
        ("eps", c_float),
        ("dtype", c_int32),
    )


class ShortConv(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("num_channels", c_int64),
        ("kernel_size", c_int64),
        ("block_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("dtype", c_int32),
    )


class TapeCall(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its arguments alive."""

    _fields_ = (("function", c_int32), ("num_patches", c_int32), ("arguments", c_int64 * 11))


class TapePatch(ctypes.Structure):
    """The struct of this name in kernels.h."""

    _fields_ = (
        ("argument", c_int32),
        ("base", c_int32),
        ("count", c_int32),
        ("per_count", c_int64),
        ("offset", c_int64),
    )


class RankGroup(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("memory", c_void_p),
        ("pidfds", POINTER(c_int32)),
        ("piece_bytes", c_int64),
        ("timeout_ns", c_int64),
        ("size", c_int32),
        ("rank", c_int32),
        ("num_pieces", c_uint32),
        ("is_waiting", c_int32),
    )


_ROWS = (c_void_p, c_int64)  # a pointer and the stride of its rows
_HEADS = (*_ROWS, c_int64)  # the same, and the stride of the heads
SIGNATURES: dict[str, list[Any]] = {  # Any: ctypes has no common type for them
    "inflight_bind_threads": [POINTER(c_int32), c_int32],
    "inflight_rms_norm": [*_ROWS, *_ROWS, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32],
    "inflight_norm_and_rotate": [*_HEADS, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int32],
    "inflight_linear": [*_ROWS, c_int32, *_ROWS, c_int32, c_int64, POINTER(LinearWeight)],
    "inflight_linear_of_heads": [*(*_HEADS, *_HEADS, c_int32, c_int64, c_int64), POINTER(LinearWeight)],
    "inflight_copy_heads": [*_HEADS, *_HEADS, c_int64, c_int64, c_int64, c_int32],
    "inflight_packed_size": [POINTER(LinearWeight), POINTER(c_int64), POINTER(c_int64)],
    "inflight_packed_features": [POINTER(LinearWeight), c_void_p],
    "inflight_pack_linear": [c_void_p, c_int32, c_void_p, c_void_p, POINTER(LinearWeight)],
    "inflight_quantize_weight": [
        *(*_ROWS, c_int32, c_int64, c_int64, c_int64, c_int32),
        *(c_void_p, c_void_p, c_void_p),
    ],
    "inflight_multiply_activation": [*_ROWS, *_ROWS, c_int64, c_int64, c_int32, c_int32],
    "inflight_add_and_scale": [*_ROWS, *_ROWS, *_ROWS, c_int64, c_int64, c_int32],
    "inflight_select_rows": [*_ROWS, c_void_p, c_void_p, c_int64, c_int64],
    "inflight_replay": [POINTER(TapeCall), c_int64, POINTER(TapePatch), POINTER(c_int64)],
    "inflight_apply_token_masks": [c_void_p, c_int64, c_void_p, c_void_p, c_int64],
    "inflight_attention_scratch_bytes": [c_int32, c_int32],
    "inflight_group_memory_bytes": [c_int32, c_int64],
    "inflight_all_reduce": [POINTER(RankGroup), c_void_p, c_int64, c_int32],
    "inflight_all_gather": [POINTER(RankGroup), c_void_p, c_void_p, c_int64, c_int64],
    "inflight_broadcast": [POINTER(RankGroup), c_void_p, c_int64],
    "inflight_leave_group": [POINTER(RankGroup)],
    "inflight_paged_attention": [
        *(*_ROWS, *_ROWS, *_ROWS, c_void_p, c_void_p),
        *(POINTER(AttentionStep), POINTER(HeadLayout), POINTER(AttentionParams)),
    ],
    "inflight_gated_delta": [*_ROWS, c_void_p, c_void_p, POINTER(AttentionStep), POINTER(GatedDelta)],
    "inflight_short_conv": [*_ROWS, c_void_p, c_void_p, POINTER(AttentionStep), POINTER(ShortConv)],
}

# the other functions return nothing
RESULTS = {
    "inflight_bind_threads": c_int32,
    "inflight_attention_scratch_bytes": c_int64,
    "inflight_group_memory_bytes": c_int64,
    "inflight_all_reduce": c_int32,
    "inflight_all_gather": c_int32,
    "inflight_broadcast": c_int32,
    "inflight_replay": c_int32,
}
