"""The product x @ weight.T with weights of 4 or 8 bits, in Triton. A program converts weights to x's dtype in registers.

Weights are stored group after group, so that a program reads one range of memory for its output features:

    values   uint8 or int8 [num_groups, out_features, group_size * bits / 8]
    scales   [num_groups or 1, out_features]
    offsets  in the shape of scales; left out if each offset is its scale times 8 (4 bits) or 128 (8 bits)

    4 bits:  byte j of a group has the group's feature j in the low half and feature group_size / 2 + j in the high half. So
             each half of the group is a separate product, and no program has to interleave values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gate import GATE_CODES
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kernels.triton.linear import linear_configs
from inflight.kernels.triton.split_k import SplitKScratch, TileConfig, block_m, finish_tile, tile_features

GROUP_SIZES = (128, 64, 32)
# (block_n, num_warps, num_stages)
TILES = ((64, 4, 6), (128, 8, 6))
PROGRAMS = (1, 2, 4)  # per multiprocessor
_DEQUANTIZED_FEATURES = 32  # per program


@dataclass(frozen=True, kw_only=True)
class PackedIntegers:
    """A weight in the layout of the module docstring. weight = (value * scale - offset) * factor; `factor` is a power of
    two."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    group_size: int
    factor: float

    @property
    def out_features(self) -> int:
        return self.values.shape[1]

    @property
    def in_features(self) -> int:
        return self.values.shape[0] * self.group_size

    @property
    def scale_stride(self) -> int:
        """Elements from one group's scales to those of the next group."""
        return 0 if len(self.scales) == 1 else self.out_features


def can_pack(in_features: int, group_size: int) -> bool:
    """Whether the kernels support the group size. `group_size` is in_features if a row has one scale."""
    return math.gcd(in_features, group_size) % GROUP_SIZES[-1] == 0


def pack_integers(weight: QuantizedWeight, *, dtype: torch.dtype) -> PackedIntegers:
    """Packs a weight for which `can_pack` is true. Scales and offsets are divided by a power of two, to fit float16, and become
    float16. For a model in float32 they do not change. `dtype`: the model's dtype."""
    values, scales, offsets, bits = weight.values, weight.scales, weight.offsets, weight.bits
    stored_group_size = weight.group_size
    group_size = next(size for size in GROUP_SIZES if stored_group_size % size == 0)
    if offsets is not None and torch.equal(offsets, scales * 2 ** (bits - 1)):
        values, offsets = (values if bits == 4 else (values ^ 128).view(torch.int8)), None
    exponent = 0
    if dtype != torch.float32:
        largest = max(float(tensor.abs().max()) for tensor in (scales, offsets) if tensor is not None)
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0

    def by_group(tensor: Tensor) -> Tensor:
        if scales.shape[1] > 1:
            tensor = tensor.repeat_interleave(stored_group_size // group_size, dim=1)
        held = (tensor * 2.0**-exponent).to(torch.float32 if dtype == torch.float32 else torch.float16)
        return held.t().contiguous()

    grouped = values.view(len(values), -1, group_size).transpose(0, 1)  # [num_groups, out_features, group_size]
    if bits == 4:
        low, high = grouped.chunk(2, dim=-1)
        grouped = low | high << 4
    return PackedIntegers(
        values=grouped.contiguous(),
        scales=by_group(scales),
        offsets=None if offsets is None else by_group(offsets),
        bits=bits,
        group_size=group_size,
        factor=2.0**exponent,
    )


@triton.jit
def load_scales(scales, offsets, group, stride, features, HAS_OFFSETS: tl.constexpr):
    """Returns scales and offsets, [BLOCK_N] each, in their stored dtype. If there are no offsets, returns the scales twice."""
    at = group * stride + features
    scale = tl.load(scales + at)
    if HAS_OFFSETS:
        offset = tl.load(offsets + at)
    else:
        offset = scale
    return scale, offset


@triton.jit
def widened(scale, offset, BITS: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """Converts the results of `load_scales` to float32, so that weight = value * scale - offset."""
    scale = scale.to(tl.float32)
    if HAS_OFFSETS:
        offset = offset.to(tl.float32)
    elif BITS == 4:
        offset = scale * 8.0
    else:
        offset = scale * 0.0
    return scale, offset


@triton.jit(do_not_specialize=["num_rows"])
def weight_only_kernel(
    x,
    values,
    scales,
    offsets,
    bias,
    out,
    partials,
    counters,
    factor,
    num_rows,
    out_features,
    num_groups,
    scale_stride,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each program computes a tile of output features over a split (a part) of the groups."""
    BYTES: tl.constexpr = GROUP * BITS // 8
    features = tile_features(out_features, GATE, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    is_row = (rows < num_rows)[None, :]
    per_split = tl.cdiv(num_groups, tl.num_programs(1))
    first = tl.program_id(1) * per_split
    inner = tl.arange(0, BYTES)
    stored = values + features.to(tl.int64)[:, None] * BYTES + inner[None, :]
    inputs = x + rows.to(tl.int64)[None, :] * x_stride + inner[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    last = num_groups - 1
    # The compiler does not pipeline such small loads. So scales are loaded one group before they are converted and used.
    scale, offset = load_scales(scales, offsets, tl.minimum(first, last), scale_stride, features, HAS_OFFSETS)
    for group in range(first, tl.minimum(first + per_split, num_groups)):
        held_scale, held_offset = scale, offset
        scale, offset = load_scales(scales, offsets, tl.minimum(group + 1, last), scale_stride, features, HAS_OFFSETS)
        wide_scale, wide_offset = widened(held_scale, held_offset, BITS, HAS_OFFSETS)
        value = tl.load(stored + tl.cast(group, tl.int64) * out_features * BYTES)
        first_part = (value & 15) if BITS == 4 else value
        w = (first_part.to(tl.float32) * wide_scale[:, None] - wide_offset[:, None]).to(x.dtype.element_ty)
        xs = tl.load(inputs + group * GROUP, mask=is_row, other=0.0)
        total = tl.dot(w, xs, total, input_precision="ieee")
        if BITS == 4:
            w = ((value >> 4).to(tl.float32) * wide_scale[:, None] - wide_offset[:, None]).to(x.dtype.element_ty)
            xs = tl.load(inputs + group * GROUP + BYTES, mask=is_row, other=0.0)
            total = tl.dot(w, xs, total, input_precision="ieee")
    total *= factor
    finish_tile(
        total, scales, bias, out, partials, counters, num_rows, out_features, out_stride,
        False, HAS_BIAS, GATE, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def weight_only_linear(
    x: Tensor,
    weight: PackedIntegers,
    bias: Tensor | None,
    out: Tensor,
    config: TileConfig,
    scratch: SplitKScratch,
    *,
    gate: str | None = None,
) -> None:
    """Computes the same as `linear` in linear.py, with a weight of 4 or 8 bits."""
    num_rows, in_features = x.shape
    assert x.stride(1) == 1 and out.stride(1) == 1 and in_features == weight.in_features
    assert weight.out_features == out.shape[1] * (1 + (gate is not None))
    weight_only_kernel[(triton.cdiv(weight.out_features, config.block_n), config.num_splits)](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        x if bias is None else bias,
        out,
        scratch.partials,
        scratch.counters,
        weight.factor,
        num_rows,
        weight.out_features,
        len(weight.values),
        weight.scale_stride,
        x.stride(0),
        out.stride(0),
        BITS=weight.bits,
        GROUP=weight.group_size,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=bias is not None,
        GATE=GATE_CODES[gate],
        BLOCK_M=block_m(num_rows),
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def weight_only_configs(weight: PackedIntegers, num_multiprocessors: int) -> list[TileConfig]:
    """See `linear_configs`. A program reads one group of a weight at a time."""
    tiles = [(n, weight.group_size, num_warps, num_stages) for n, num_warps, num_stages in TILES]
    return linear_configs(weight.out_features, weight.in_features, num_multiprocessors, tiles, PROGRAMS)


@triton.jit
def dequantize_kernel(
    values,
    scales,
    offsets,
    out,
    factor,
    first_feature,
    num_features,
    out_features,
    scale_stride,
    out_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each program computes one group of one tile of the features [first_feature, first_feature + num_features)."""
    BYTES: tl.constexpr = GROUP * BITS // 8
    wanted = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_there = (wanted < num_features)[:, None]
    features = first_feature + tl.minimum(wanted, num_features - 1)
    group = tl.program_id(1)
    inner = tl.arange(0, BYTES)
    narrow_scale, narrow_offset = load_scales(scales, offsets, group, scale_stride, features, HAS_OFFSETS)
    scale, offset = widened(narrow_scale, narrow_offset, BITS, HAS_OFFSETS)
    value = tl.load(values + (group.to(tl.int64) * out_features + features)[:, None] * BYTES + inner[None, :])
    to = out + wanted.to(tl.int64)[:, None] * out_stride + group * GROUP + inner[None, :]
    first_part = (value & 15) if BITS == 4 else value
    # `weight_only_kernel` rounds before it multiplies by the factor, and this kernel rounds after it. Both give the same value,
    # because the factor is a power of two.
    w = (first_part.to(tl.float32) * scale[:, None] - offset[:, None]) * factor
    tl.store(to, w.to(out.dtype.element_ty), mask=is_there)
    if BITS == 4:
        w = ((value >> 4).to(tl.float32) * scale[:, None] - offset[:, None]) * factor
        tl.store(to + BYTES, w.to(out.dtype.element_ty), mask=is_there)


def dequantize(weight: PackedIntegers, first_feature: int, out: Tensor) -> None:
    """The rows of `weight` from `first_feature` on -> out [num_features, in_features], contiguous."""
    num_features = len(out)
    assert out.is_contiguous() and first_feature + num_features <= weight.out_features
    dequantize_kernel[(triton.cdiv(num_features, _DEQUANTIZED_FEATURES), len(weight.values))](
        weight.values,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        out,
        weight.factor,
        first_feature,
        num_features,
        weight.out_features,
        weight.scale_stride,
        out.stride(0),
        BITS=weight.bits,
        GROUP=weight.group_size,
        HAS_OFFSETS=weight.offsets is not None,
        BLOCK_N=_DEQUANTIZED_FEATURES,
        num_warps=4,
    )
