"""What a C++ kernel does not support never reaches it: the wrapper refuses, and says what was given and what is allowed.

The wrappers get a library that computes nothing. A call that is not refused ends the test, and writes to no memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.attention.backend import AttentionParams, LayerCache
from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.attention.metadata import AttentionInputs
from inflight.config import unknown_family
from inflight.distributed.shared_collectives import PIECE_BYTES, SharedCollectives
from inflight.errors import ConfigError
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kernels.cpu import limits
from inflight.kernels.cpu.functions import AttentionStep, LinearWeight
from inflight.kernels.cpu.gated_delta import CpuGatedDelta
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import bind_threads
from inflight.kernels.cpu.packed_heads import PackedHeads
from inflight.kernels.cpu.packing import pack, pack_float, pack_integers, quantize_rows
from inflight.kernels.gated_delta import GatedDeltaShape, GatedDeltaWeights
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kernels.short_conv import CpuShortConv
from inflight.kernels.token_masks import cpu_apply_token_masks
from inflight.layers.linear_method import KernelLinear

CPU_FOLDER = Path(limits.__file__).parent
BFLOAT16, INT8 = torch.bfloat16, torch.int8
_COMPUTES_NOTHING = ("inflight_packed_size", "inflight_packed_features", "inflight_pack_linear")


class CalledError(Exception):
    """A kernel was called."""


class NoLibrary:
    """Functions that say how large something is are answered. Every other function raises."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> int:
            if name == "inflight_group_memory_bytes":
                return 1 << 16 if arguments[0] <= 4 else 0
            if name not in _COMPUTES_NOTHING:
                raise CalledError(name)
            return 0

        return call


LIBRARY: Any = NoLibrary()
OPS = CpuLayerOps(LIBRARY)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# -- attention ---------------------------------------------------------------------------------------------------------


def spec_of(
    head_dim: int = 32, block_size: int = 16, dtype: str = "float32", *, has_values: bool = True, num_kv_heads: int = 2
) -> KVCacheSpec:
    return KVCacheSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        itemsize={"float32": 4, "int8": 1}.get(dtype, 2),
        scale_bytes=4 if dtype == "int8" else 0,
        has_values=has_values,
    )


def view_of(spec: KVCacheSpec, layer_index: int = 0) -> Tensor:
    return CpuPagedBackend(LIBRARY).kv_cache_view(zeros(3, spec.block_bytes, dtype=torch.uint8), spec, layer_index)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of(24), "heads whose size is a multiple of 16, not 24"),
        (spec_of(8), "heads whose size is a multiple of 16, not 8"),
        (spec_of(block_size=24), "a block_size that is a multiple of 16, not 24"),
        (spec_of(dtype="float16"), "float32 or bfloat16, with a KV cache .* not in torch.float16"),
        (spec_of(528, dtype="int8"), "at most 512 elements for a KV cache of int8, not 528"),
    ],
)
def test_a_cache_that_the_attention_kernel_does_not_support_is_not_made(spec: KVCacheSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        view_of(spec)


def test_a_layer_that_is_not_in_the_arena_has_no_cache() -> None:
    assert view_of(spec_of()).shape == (3, 4, 16 * 32)
    with pytest.raises(AssertionError, match="layer 1 needs 8192 bytes of a block"):
        view_of(spec_of(), layer_index=1)


def attend(
    *,
    num_heads: int = 4,
    num_new: int = 2,
    num_values: int | None = None,
    head_dim: int = 32,
    num_tokens: int = 5,
    dtype: torch.dtype = torch.float32,
    cache: Tensor | None = None,
    block_size: int = 16,
    value_dim: int | None = None,
    num_sinks: int | None = None,
    bias: Tensor | None = None,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """By default a call that the kernel supports. `change` changes the keys."""
    backend, spec = CpuPagedBackend(LIBRARY), spec_of(block_size=block_size)
    arrays = (np.array(x, dtype=np.int32) for x in ([0, 5], [5], [0], [[1]]))
    names = "query_start_loc", "seq_lens", "num_computed_tokens", "block_table"
    metadata = backend.build_metadata(AttentionInputs(**dict(zip(names, arrays, strict=True))), spec)
    num_values = num_values if num_values is not None else num_new if value_dim is None else 0
    query, key, value = (zeros(num_tokens, n, head_dim, dtype=dtype) for n in (num_heads, num_new, num_values))
    sinks = None if num_sinks is None else zeros(num_sinks)
    params = AttentionParams(1.0, sinks=sinks, value_dim=value_dim, position_bias=bias)
    backend.forward(
        query, change(key), value, LayerCache(view_of(spec_of()) if cache is None else cache, metadata, params)
    )


LATENT = view_of(spec_of(has_values=False, num_kv_heads=1))


def test_what_the_attention_kernel_supports_reaches_it() -> None:
    calls: list[dict[str, Any]] = [
        {},
        {"num_new": 0},
        {"num_sinks": 4},
        {"bias": zeros(4, 7)},
        {"cache": LATENT, "value_dim": 16, "num_new": 1},
        {"cache": view_of(spec_of(dtype="int8"))},
        {"cache": view_of(spec_of(dtype="bfloat16")), "dtype": BFLOAT16},
    ]
    for call in calls:
        with pytest.raises(CalledError, match="inflight_paged_attention"):
            attend(**call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"head_dim": 24}, "multiple of 16, not 24"),
        ({"head_dim": 48}, "that fit the cache"),
        ({"block_size": 32}, "that fit the cache, whose block_size is 32"),
        ({"cache": view_of(spec_of(dtype="bfloat16"))}, "of the same dtype or int8"),
        ({"dtype": torch.float16}, "not in torch.float16"),
        ({"num_heads": 5}, "heads side by side"),
        ({"num_new": 1}, "heads side by side"),
        ({"num_values": 0}, "heads side by side"),
        ({"num_tokens": 4}, "queries, keys and values of 5 tokens"),
        ({"change": lambda key: key[:4]}, "queries, keys and values of 5 tokens"),
        ({"change": lambda key: key.to(BFLOAT16)}, "in one dtype"),
        ({"change": lambda key: key.transpose(1, 2).contiguous().transpose(1, 2)}, "heads side by side"),
        ({"bias": zeros(3, 7)}, "biases in float32 for an odd number of distances, for each of 4 heads"),
        ({"bias": zeros(4, 8)}, "biases in float32 for an odd number of distances, for each of 4 heads"),
        ({"bias": zeros(4, 7, dtype=BFLOAT16)}, "biases in float32"),
        ({"num_sinks": 3}, "a sink in float32 for each of 4 heads"),
        ({"cache": LATENT, "value_dim": 24, "num_new": 1}, "multiple of 16 below that of the keys, 32, not 24"),
        ({"cache": LATENT, "value_dim": 32, "num_new": 1}, "multiple of 16 below that of the keys, 32, not 32"),
        ({"cache": LATENT, "value_dim": 48, "num_new": 1}, "multiple of 16 below that of the keys, 32, not 48"),
    ],
)
def test_what_the_attention_kernel_does_not_support_is_refused(call: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, AssertionError), match=message):
        attend(**call)


def test_a_step_whose_arrays_do_not_fit_together_is_refused() -> None:
    one, two = np.array([1], dtype=np.int32), np.array([1, 2], dtype=np.int32)
    inputs = AttentionInputs(query_start_loc=two, seq_lens=one, num_computed_tokens=one, block_table=one[None])
    backend = CpuPagedBackend(LIBRARY)
    assert backend.build_metadata(inputs, spec_of()).num_tokens == 2
    for name, array in (("query_start_loc", one), ("num_computed_tokens", two), ("block_table", np.zeros((0, 1)))):
        with pytest.raises(AssertionError, match="1 rows needs arrays"):
            backend.build_metadata(replace(inputs, **{name: array}), spec_of())


# -- recurrent layers --------------------------------------------------------------------------------------------------

SHAPE = GatedDeltaShape(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, kernel_size=4)
MATRIX_BYTES = 4 * 16 * 32 * 4


def gated_delta_weights(shape: GatedDeltaShape) -> GatedDeltaWeights:
    heads = zeros(shape.num_value_heads)
    conv = zeros(shape.kernel_size, shape.num_channels)
    return GatedDeltaWeights(conv=conv, rates=heads, step_bias=heads, norm=zeros(shape.value_dim), eps=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"key_dim": 24},
        {"value_dim": 48},
        {"num_value_heads": 5},
        {"kernel_size": 9},
        {"kernel_size": 0},
        {"num_key_heads": 0},
    ],
)
def test_a_gated_delta_that_the_kernel_does_not_support_is_not_made(change: dict[str, int]) -> None:
    CpuGatedDelta(LIBRARY, SHAPE, gated_delta_weights(SHAPE))
    shape = replace(SHAPE, **change)
    assert not CpuGatedDelta.supports(shape, BFLOAT16)
    with pytest.raises(ConfigError, match=r"key_dim .*16.*value_dim .*32"):
        CpuGatedDelta(LIBRARY, shape, gated_delta_weights(SHAPE))


@pytest.mark.parametrize("name", ["conv", "rates", "step_bias", "norm"])
def test_a_gated_delta_needs_the_weights_of_its_shape(name: str) -> None:
    weights = gated_delta_weights(SHAPE)
    for wrong in (getattr(weights, name)[1:], getattr(weights, name).to(BFLOAT16)):
        with pytest.raises(AssertionError, match="contiguous weight in float32"):
            CpuGatedDelta(LIBRARY, SHAPE, replace(weights, **{name: wrong}))


def test_a_gated_delta_needs_rows_and_states_of_its_shape() -> None:
    kernel, width = CpuGatedDelta(LIBRARY, SHAPE, gated_delta_weights(SHAPE)), sum(SHAPE.row_parts)
    rows, states = zeros(3, width), zeros(2, MATRIX_BYTES + 3 * SHAPE.num_channels * 4, dtype=torch.uint8)
    offsets, step = [0, MATRIX_BYTES, states.shape[1]], AttentionStep(state_bytes=states.shape[1], num_states=1)
    with pytest.raises(CalledError):
        kernel(rows, states, offsets, step)
    for wrong_rows in (rows[:, 1:], rows.to(torch.float16), zeros(3, 2 * width)[:, ::2]):
        with pytest.raises(AssertionError, match="gated_delta needs rows"):
            kernel(wrong_rows, states, offsets, step)
    for wrong_states, at in (
        (states[:, :-1], MATRIX_BYTES),
        (states, MATRIX_BYTES + 1),
        (states, MATRIX_BYTES - 1),
        (states.view(INT8), MATRIX_BYTES),
        (zeros(2, 2 * states.shape[1], dtype=torch.uint8)[:, ::2], MATRIX_BYTES),
    ):
        with pytest.raises(AssertionError, match="states that lie"):
            kernel(rows, wrong_states, [0, at, states.shape[1]], step)
    for state_bytes, num_states in ((states.shape[1], 0), (states.shape[1], 2), (states.shape[1] - 1, 1)):
        with pytest.raises(AssertionError, match="states that lie"):
            kernel(rows, states, offsets, AttentionStep(state_bytes=state_bytes, num_states=num_states))


@pytest.mark.parametrize(("kernel_size", "num_channels"), [(4, 24), (9, 32), (0, 32), (4, 0)])
def test_a_short_convolution_that_the_kernel_does_not_support_is_not_made(kernel_size: int, num_channels: int) -> None:
    weight = zeros(kernel_size, num_channels)
    assert not CpuShortConv.supports(weight, torch.float32)
    with pytest.raises(ConfigError, match=rf"not {num_channels} channels"):
        CpuShortConv(LIBRARY, weight, None)


def test_a_short_convolution_needs_weights_rows_and_states_of_its_shape() -> None:
    for weight, bias in (
        (zeros(3, 32, dtype=BFLOAT16), None),
        (zeros(32, 3).T, None),
        (zeros(3, 32), zeros(16)),
        (zeros(3, 32), zeros(32, dtype=BFLOAT16)),
    ):
        with pytest.raises(AssertionError, match="float32 for 32 channels"):
            CpuShortConv(LIBRARY, weight, bias)
    kernel = CpuShortConv(LIBRARY, zeros(3, 32), zeros(32))
    rows, states = zeros(5, 96), zeros(2, 2 * 32 * 4, dtype=torch.uint8)
    step = AttentionStep(state_bytes=256, num_states=1)
    with pytest.raises(CalledError):
        kernel(rows, states, [0], step)
    for wrong in (rows[:, 1:], rows.half(), zeros(5, 192)[:, ::2]):
        with pytest.raises(AssertionError, match="short_conv needs rows"):
            kernel(wrong, states, [0], step)
    with pytest.raises(AssertionError, match="needs states"):
        kernel(rows, states[:, 1:], [0], step)
    with pytest.raises(AssertionError, match="needs states"):
        kernel(rows, states, [0], AttentionStep(state_bytes=256))


# -- linear layers -----------------------------------------------------------------------------------------------------


def described(in_features: int, out_features: int, bits: int, group_size: int, gate: int = 0) -> LinearWeight:
    return LinearWeight(
        in_features=in_features, out_features=out_features, bits=bits, group_size=group_size, scale=1.0, gate=gate
    )


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (described(6, 4, 16, 6), "input features that is a multiple of 4, not 6"),
        (described(0, 4, 16, 0), "input features that is a multiple of 4, not 0"),
        (described(8, 4, 2, 8), "4, 8, 16 or 32 bits, not 2"),
        (described(96, 4, 4, 48), "multiple of 32 that divides the 96 input features, not 48"),
        (described(16, 4, 4, 16), "multiple of 32 that divides the 16 input features, not 16"),
        (described(96, 4, 4, 64), "multiple of 32 that divides the 96 input features, not 64"),
        (described(96, 4, 8, 0), "multiple of 16 that divides the 96 input features, not 0"),
        (described(70000, 4, 8, 70000), "at most 66311 input features for integer weights, not 70000"),
    ],
)
def test_a_weight_that_the_kernels_do_not_support_is_not_packed(weight: LinearWeight, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pack(LIBRARY, weight, HugePages(), None, [zeros(4, weight.in_features)])


def test_a_method_that_uses_the_kernels_leaves_the_other_weights_to_torch() -> None:
    method = KernelLinear(LIBRARY, torch.float32, bits=None, group_size=64)
    assert method.is_batch_invariant(8) and not method.is_batch_invariant(6)
    assert not method.is_batch_invariant(70000), "a quantized weight of this size is multiplied by torch"
    assert method.prepare([torch.eye(6)], None)(torch.eye(6), torch.float32).equal(torch.eye(6))
    out = torch.empty(2, 1, 3)
    method.prepare_heads(torch.ones(1, 3, 6))(torch.ones(2, 1, 6), out)
    assert out.equal(torch.full((2, 1, 3), 6.0))


@pytest.mark.parametrize(
    ("weight", "parts", "others"),
    [
        (described(8, 4, 32, 8), [zeros(3, 8)], {}),
        (described(8, 4, 32, 8), [zeros(4, 12)], {}),
        (described(8, 4, 32, 8), [zeros(8, 4).T], {}),
        (described(8, 4, 32, 8), [zeros(4, 8, dtype=BFLOAT16)], {}),
        (described(8, 4, 16, 8), [zeros(4, 8, dtype=torch.float16)], {}),
        (described(8, 4, 32, 8), [zeros(2, 8), zeros(2, 8, dtype=BFLOAT16)], {}),
        (described(8, 4, 32, 8), [zeros(4, 8)], {"bias": zeros(3)}),
        (described(8, 4, 32, 8, gate=3), [zeros(4, 8)], {}),
        (described(8, 5, 32, 8, gate=1), [zeros(5, 8)], {}),
        (described(8, 4, 8, 8), [zeros(4, 8, dtype=INT8)], {}),
        (described(8, 4, 8, 8), [zeros(4, 8, dtype=INT8)], {"scales": zeros(4, 2)}),
        (described(8, 4, 8, 8), [zeros(4, 8, dtype=INT8)], {"scales": zeros(4, 1, dtype=BFLOAT16)}),
        (described(8, 4, 8, 8), [zeros(4, 8, dtype=INT8)], {"scales": zeros(3, 1)}),
        (described(8, 4, 8, 8), [zeros(4, 8, dtype=INT8)], {"scales": zeros(4, 1).to("meta")}),
        (described(8, 4, 32, 8), [zeros(4, 8).to("meta")], {}),
        (described(8, 4, 32, 8), [zeros(4, 8)], {"bias": zeros(4).to("meta")}),
    ],
)
def test_a_weight_that_does_not_fit_its_description_is_not_packed(
    weight: LinearWeight, parts: list[Tensor], others: dict[str, Tensor]
) -> None:
    with pytest.raises(AssertionError, match=r"needs? "):
        pack(LIBRARY, weight, HugePages(), others.pop("bias", None), parts, **others)


def test_a_weight_multiplies_only_rows_that_fit() -> None:
    floats = pack_float(LIBRARY, HugePages(), [zeros(6, 8)], None, gate=None)
    integers = QuantizedWeight(values=zeros(6, 8, dtype=INT8), scales=torch.ones(6, 1), offsets=None, bits=8)
    quantized = pack_integers(LIBRARY, HugePages(), integers, None, gate=None)
    for layer, dtype in ((floats, torch.float32), (quantized, BFLOAT16), (quantized, torch.float32)):
        with pytest.raises(CalledError):
            layer(zeros(3, 8, dtype=dtype), torch.float32)
    rows = zeros(3, 8)
    for layer, x in (
        (floats, rows[:, 1:]),
        (floats, zeros(3, 16)[:, ::2]),
        (floats, rows.to(BFLOAT16)),
        (quantized, rows.half()),
    ):
        with pytest.raises(AssertionError, match="rows of its input"):
            layer(x, torch.float32)
    for out_dtype, out in ((torch.float32, zeros(3, 7)), (torch.float32, zeros(2, 6)), (BFLOAT16, zeros(3, 6))):
        with pytest.raises(AssertionError, match="memory for its results"):
            floats(rows, out_dtype, out)
    with pytest.raises(AssertionError, match="in float32 or bfloat16"):
        floats(rows, torch.float16)


def test_the_weights_of_heads_have_one_shape_and_multiply_only_rows_that_fit() -> None:
    small, large, halves = (
        pack_float(LIBRARY, HugePages(), [zeros(size, 8, dtype=dtype)], None, gate=None)
        for size, dtype in ((6, torch.float32), (7, torch.float32), (6, BFLOAT16))
    )
    for heads in ([small, large], [small, halves]):
        with pytest.raises(AssertionError, match="heads need weights of one shape"):
            PackedHeads(LIBRARY, heads)
    multiply, x, out = PackedHeads(LIBRARY, [small, small]), zeros(3, 2, 8), zeros(3, 2, 6)
    with pytest.raises(CalledError):
        multiply(x, out)
    for wrong_x, wrong_out in (
        (x[:, :1], out),
        (x, out[:, :, 1:]),
        (x, out[:2]),
        (x.to(BFLOAT16), out.to(BFLOAT16)),
        (x, out.to(BFLOAT16)),
        (zeros(3, 2, 16)[:, :, ::2], out),
    ):
        with pytest.raises(AssertionError, match="a linear layer of heads needs"):
            multiply(wrong_x, wrong_out)


@pytest.mark.parametrize(
    ("part", "bits", "group_size"),
    [
        (zeros(4, 40), 4, 40),
        (zeros(4, 96), 4, 64),
        (zeros(4, 6), 8, 0),
        (zeros(4, 64), 16, 64),
        (zeros(4, 128)[:, ::2], 8, 0),
        (zeros(4, 64).half(), 8, 0),
    ],
)
def test_a_weight_that_the_kernel_cannot_quantize_is_refused(part: Tensor, bits: int, group_size: int) -> None:
    with pytest.raises((ConfigError, AssertionError), match=r"needs? "):
        quantize_rows(LIBRARY, [part], bits=bits, group_size=group_size)


# -- between matrix products -------------------------------------------------------------------------------------------

X, HEADS, ROWS = zeros(3, 8), zeros(3, 2, 8), torch.tensor([0, 2])
ANGLES = zeros(3, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: OPS.rms_norm(X, zeros(7), 1e-6),
        lambda: OPS.rms_norm(X, zeros(8, dtype=BFLOAT16), 1e-6),
        lambda: OPS.rms_norm(zeros(3, 16)[:, ::2], zeros(8), 1e-6),
        lambda: OPS.rms_norm(X.half(), zeros(8).half(), 1e-6),
        lambda: OPS.rms_norm(X, zeros(16)[::2], 1e-6),
        lambda: OPS.add_and_rms_norm(zeros(3, 7), X, zeros(8), 1e-6),
        lambda: OPS.add_and_rms_norm(X.to(BFLOAT16), X, zeros(8), 1e-6),
        lambda: OPS.norm_heads(HEADS, zeros(1, 8), 1e-6),
        lambda: OPS.norm_heads(HEADS, zeros(2, 7), 1e-6),
        lambda: OPS.norm_heads(HEADS, zeros(2, 8, dtype=BFLOAT16), 1e-6),
        lambda: OPS.norm_heads(zeros(3, 2, 16)[:, :, ::2], zeros(2, 8), 1e-6),
        lambda: OPS.norm_and_rotate(HEADS, None, 0.0, zeros(2, 8), ANGLES),
        lambda: OPS.norm_and_rotate(HEADS, None, 0.0, ANGLES, zeros(3, 4)),
        lambda: OPS.norm_and_rotate(HEADS, None, 0.0, ANGLES.to(BFLOAT16), ANGLES.to(BFLOAT16)),
        lambda: OPS.norm_and_rotate(zeros(3, 2, 7), None, 0.0, zeros(3, 7), zeros(3, 7)),
        lambda: OPS.norm_and_rotate(HEADS, zeros(1, 8), 0.0, ANGLES, ANGLES),
        lambda: OPS.multiply_activation(X, zeros(3, 7), "silu"),
        lambda: OPS.multiply_activation(X, X.to(BFLOAT16), "silu"),
        lambda: OPS.multiply_activation(X.half(), X.half(), "silu"),
        lambda: OPS.add_and_scale(X, zeros(2, 8), None),
        lambda: OPS.add_and_scale(X, None, zeros(2, 1)),
        lambda: OPS.add_and_scale(X, None, zeros(1, dtype=BFLOAT16)),
        lambda: OPS.add_and_scale(X, None, zeros(3)),
        lambda: OPS.copy_heads(HEADS, zeros(3, 2, 7)),
        lambda: OPS.copy_heads(HEADS, HEADS.to(BFLOAT16)),
        lambda: OPS.copy_heads(HEADS.half(), HEADS.half()),
        lambda: OPS.rms_norm(X.to("meta"), zeros(8), 1e-6),
        lambda: OPS.rms_norm(X, zeros(8).to("meta"), 1e-6),
        lambda: OPS.copy_heads(HEADS, HEADS.to("meta")),
        lambda: OPS.select_rows(X, torch.tensor([0], device="meta")),
        lambda: OPS.select_rows(X, torch.tensor([3])),
        lambda: OPS.select_rows(X, torch.tensor([0, -1])),
        lambda: OPS.select_rows(X, torch.tensor([0, 1], dtype=torch.int32)),
        lambda: OPS.select_rows(X, torch.tensor([0, 1, 2, 1])[::2]),
        lambda: cpu_apply_token_masks(LIBRARY, zeros(2, 33), torch.tensor([2]), zeros(1, 2, dtype=torch.int32)),
        lambda: cpu_apply_token_masks(LIBRARY, zeros(2, 33), torch.tensor([0]), zeros(1, 1, dtype=torch.int32)),
        lambda: cpu_apply_token_masks(LIBRARY, zeros(2, 33), torch.tensor([0]), zeros(1, 2, dtype=torch.int64)),
        lambda: cpu_apply_token_masks(LIBRARY, zeros(2, 66)[:, ::2], torch.tensor([0]), zeros(1, 2, dtype=torch.int32)),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(call: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match=r"needs?|must exist"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: OPS.rms_norm(X[:, 1:], zeros(7), 1e-6),
        lambda: OPS.add_and_rms_norm(X, X, zeros(8), 1e-6),
        lambda: OPS.norm_heads(HEADS[:, 1:], zeros(1, 8), 1e-6),
        lambda: OPS.norm_and_rotate(HEADS, zeros(2, 8), 0.0, ANGLES, ANGLES),
        lambda: OPS.multiply_activation(X, X, "silu"),
        lambda: OPS.add_and_scale(X, X, zeros(3, 1)),
        lambda: OPS.add_and_scale(X, None, zeros(1)),
        lambda: OPS.copy_heads(HEADS, zeros(3, 2, 8)),
        lambda: OPS.select_rows(X, ROWS),
        lambda: OPS.select_rows(X, ROWS[:0]),
        lambda: cpu_apply_token_masks(LIBRARY, zeros(2, 33), ROWS[:1], zeros(1, 2, dtype=torch.int32)),
    ],
)
def test_tensors_that_fit_together_reach_the_kernel(call: Callable[[], None]) -> None:
    with pytest.raises(CalledError):
        call()


# -- threads and ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [[], [-1, 0]])
def test_threads_need_cores(cores: list[int]) -> None:
    with pytest.raises(ConfigError, match="compute threads need cores"):
        bind_threads(LIBRARY, cores)


@pytest.mark.parametrize(
    ("num_ranks", "rank", "num_pidfds", "num_bytes"),
    [(2, 2, 2, 1 << 16), (2, -1, 2, 1 << 16), (2, 0, 1, 1 << 16), (2, 0, 2, 1 << 15), (5, 0, 5, 1 << 16)],
)
def test_ranks_share_only_memory_that_is_large_enough(
    num_ranks: int, rank: int, num_pidfds: int, num_bytes: int
) -> None:
    memory: Any = bytearray(num_bytes)
    SharedCollectives(LIBRARY, bytearray(1 << 16), [-1, -1], [0, 1], 0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="ranks need a descriptor each"):
        SharedCollectives(LIBRARY, memory, [-1] * num_pidfds, range(num_ranks), rank, 1.0)


# -- the limits --------------------------------------------------------------------------------------------------------


def test_the_limits_are_those_of_the_sources() -> None:
    sources = "".join(path.read_text() for path in [*CPU_FOLDER.glob("*.h"), *CPU_FOLDER.glob("*.cpp")])
    found = {name: int(value) for name, value in re.findall(r"constexpr \w+ (k\w+) = (\d+);", sources)}
    assert found["kGroupKeys"] == limits.BLOCK_SIZE_MULTIPLE
    assert found["kMostHeadDim"] == limits.MAX_INT8_HEAD_DIM
    assert found["kMaxConvolution"] == limits.MAX_CONVOLUTION
    assert len(re.findall(r"kLanes = 16;", sources)) == 1, "a vector of AVX-512"
    assert limits.HEAD_DIM_MULTIPLE == limits.KEY_DIM_MULTIPLE == limits.CHANNEL_MULTIPLE == 16
    assert "kTile = 2 * kLanes;" in sources and limits.VALUE_DIM_MULTIPLE == 2 * 16
    assert PIECE_BYTES % 64 == 0
    assert unknown_family._HEAD_DIM_MULTIPLE == limits.HEAD_DIM_MULTIPLE, "config/ cannot import kernels/"
