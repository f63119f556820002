"""The functions of kernels.h as ctypes sees them: the types of their arguments and results, and the structs that they take."""

import ctypes
from ctypes import POINTER, c_float, c_int8, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # `DType` of kernels.h


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:  # Any: a type of ctypes
    """The fields of a struct, in their order. Each group is a type, and the names of the fields that follow and have it."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class AttentionStep(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the arrays behind its pointers alive."""

    _fields_ = _fields(
        (c_int32, "num_rows block_size sliding_window table_stride"),
        (c_void_p, "query_start_loc seq_lens num_computed_tokens block_table"),
        (c_int64, "state_bytes"),
        (c_int32, "num_states"),
        (c_void_p, "ends"),
    )


class HeadLayout(ctypes.Structure):
    """The struct of this name in kernels.h."""

    _fields_ = _fields(
        (c_int32, "num_heads num_kv_heads head_dim value_dim dtype cache_dtype"), (c_int64, "block_stride")
    )


class AttentionParams(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = _fields(
        (c_float, "scale soft_cap"),
        (c_void_p, "sinks position_bias"),
        (c_int32, "bias_radius is_causal sees_whole_images"),
    )


class LinearWeight(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = _fields(
        (c_void_p, "packed bias"),
        (c_int64, "in_features out_features group_size"),
        (c_float, "scale"),
        (c_int32, "bits has_offsets gate has_table activation"),
        (c_int8 * 16, "table"),
    )


class GatedDelta(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = _fields(
        (c_int64, "num_key_heads num_value_heads key_dim value_dim kernel_size block_stride inputs_offset"),
        (c_void_p, "conv_weight rates step_bias norm_weight"),
        (c_float, "eps"),
        (c_int32, "dtype"),
    )


class ShortConv(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = _fields(
        (c_int64, "num_channels kernel_size block_stride"), (c_void_p, "weight bias"), (c_int32, "dtype")
    )


class ExpertRouter(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointer alive."""

    _fields_ = _fields(
        (c_int64, "num_experts top_k num_groups top_groups"),
        (c_void_p, "choice_bias expert_scale"),
        (c_float, "scale sum_offset jitter"),
        (c_int32, "scoring group_scoring renormalizes num_shared has_shared_gate"),
    )


class Experts(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = _fields(
        (c_void_p, "gate_up down balance"),
        (c_int64, "num_experts num_routed choices_per_row hidden_size inner_size"),
        (c_int32, "dtype"),
    )


class TapeCall(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its arguments alive."""

    _fields_ = (("function", c_int32), ("num_patches", c_int32), ("arguments", c_int64 * 11))


class TapePatch(ctypes.Structure):
    """The struct of this name in kernels.h."""

    _fields_ = _fields((c_int32, "argument base count"), (c_int64, "per_count offset"))


class RankGroup(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = _fields(
        (c_void_p, "memory"),
        (POINTER(c_int32), "pidfds"),
        (c_int64, "piece_bytes timeout_ns"),
        (c_int32, "size rank"),
        (c_uint32, "num_pieces"),
        (c_int32, "is_waiting"),
    )


class ExpertExchange(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = _fields(
        (POINTER(RankGroup), "group"),
        (c_void_p, "memory"),
        (c_int64, "chunk_rows results_at sums_at choices_at inputs_at"),
        (c_int32, "num_replicas replica tp_size tp_rank"),
    )


_ROWS = (c_void_p, c_int64)  # a pointer and the stride of its rows
_HEADS = (*_ROWS, c_int64)  # the same, and the stride of the heads
SIGNATURES: dict[str, list[Any]] = {  # Any: ctypes has no common type for them
    "inflight_bind_threads": [POINTER(c_int32), c_int32],
    "inflight_rms_norm": [*_ROWS, *_ROWS, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32],
    "inflight_layer_norm": [*(*_ROWS, *_ROWS, c_void_p, c_void_p, c_void_p), *(c_int64, c_int64, c_float, c_int32)],
    "inflight_activate": [*_ROWS, c_int64, c_int64, c_int32, c_int32],
    "inflight_norm_and_rotate": [*_HEADS, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int32],
    "inflight_linear": [*_ROWS, c_int32, *_ROWS, c_int32, c_int64, POINTER(LinearWeight)],
    "inflight_linear_of_heads": [*(*_HEADS, *_HEADS, c_int32, c_int64, c_int64), POINTER(LinearWeight)],
    "inflight_choose_experts": [*_ROWS, c_void_p, c_int64, POINTER(ExpertRouter)],
    "inflight_experts": [*_ROWS, c_void_p, c_void_p, c_int64, POINTER(Experts)],
    "inflight_add_experts": [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32],
    "inflight_exchange_experts": [*(*_ROWS, c_void_p, c_void_p, c_int64, POINTER(Experts), POINTER(ExpertExchange))],
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
RESULTS: dict[str, Any] = {
    **dict.fromkeys(("inflight_attention_scratch_bytes", "inflight_group_memory_bytes"), c_int64),
    **dict.fromkeys(("inflight_all_reduce", "inflight_all_gather", "inflight_broadcast"), c_int32),
    **dict.fromkeys(("inflight_bind_threads", "inflight_replay", "inflight_exchange_experts"), c_int32),
}
