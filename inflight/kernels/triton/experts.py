"""Mixtures of experts in Triton: products over rows that are sorted by expert. kernels/expert_choice.py has the formulas.

`ExpertLayer` computes the experts of a layer in four launches, none of which needs a number from the device on the host. So
they can be part of a CUDA graph:

1. `sort_pairs_kernel` sorts the pairs (token, expert) by expert.
2. `experts_kernel` multiplies the tokens of each pair by the gate and up projections of its expert.
3. `experts_kernel` multiplies these results by the down projection and by the weight of the pair.
4. `add_experts_kernel` adds the results of each token, in the order of its choices, in float32.

A program of `experts_kernel` computes a tile of output features for a block of up to BLOCK_M pairs of one expert. How many
blocks an expert has is only known on the device. So there are as many programs as the pairs can need at most, and those without
a block end at once. The weights of experts without pairs are not read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gate import GATE_CODES
from inflight.kernels.triton.layer_ops import gated
from inflight.kernels.triton.split_k import MIN_BLOCK_M, tile_features
from inflight.kernels.triton.weight_only import load_scales, widened

MAX_BLOCK_M = 64
_PAIRS_AT_ONCE = 1024  # that a program of `sort_pairs_kernel` reads
_ADDED_AT_ONCE = 1024  # features


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """One projection of all experts of a layer.

    Floats (`bits` is 0): values [num_experts, out_features, in_features] in the model's dtype; or in fp8, with scales float32
    [num_experts, out_features]. Integers of 4 or 8 bits: values, scales and offsets as in weight_only.py, with a first axis
    for the experts; an expert's weight is multiplied by its entry of `factors`, float32 [num_experts]. bias: [num_experts,
    out_features].
    """

    values: Tensor
    out_features: int
    in_features: int
    scales: Tensor | None = None
    offsets: Tensor | None = None
    factors: Tensor | None = None
    bias: Tensor | None = None
    bits: int = 0
    group_size: int = 0

    @property
    def num_experts(self) -> int:
        return len(self.values)

    @property
    def scale_stride(self) -> int:
        """Elements from one group's scales to those of the next group."""
        return 0 if self.scales is None or self.bits == 0 or self.scales.shape[1] == 1 else self.out_features


@dataclass(frozen=True, kw_only=True)
class ExpertTile:
    """`block_m` pairs, `block_n` output features; `block_k` input features are loaded at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def expert_tile(num_pairs: int, weights: ExpertWeights, dtype: torch.dtype) -> ExpertTile:
    """`dtype`: of the tokens. With few pairs for an expert, a tile is made to read weights; with many, to use them again."""
    per_expert = max(MIN_BLOCK_M, min(MAX_BLOCK_M, num_pairs // weights.num_experts))
    block_m = 1 << (per_expert - 1).bit_length()
    block_k = weights.group_size
    if block_m == MIN_BLOCK_M:
        block_k = block_k or 128 * 2 // dtype.itemsize
        return ExpertTile(block_m=block_m, block_n=32, block_k=block_k, num_warps=4, num_stages=4)
    block_k = block_k or 64 * 2 // dtype.itemsize
    return ExpertTile(block_m=block_m, block_n=128, block_k=block_k, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(choices, starts, pairs, num_pairs, num_experts, BLOCK: tl.constexpr):
    """A program for each expert, and one more, which only writes where the pairs of the last expert end. Pairs with the index
    `num_experts`, a shared expert, are left out."""
    expert = tl.program_id(0)
    before = 0  # pairs of experts with lower indices
    for first in range(0, num_pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        chosen = tl.load(choices + at * 2, mask=at < num_pairs, other=num_experts)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    if expert < num_experts:
        for first in range(0, num_pairs, BLOCK):
            at = first + tl.arange(0, BLOCK)
            is_mine = tl.load(choices + at * 2, mask=at < num_pairs, other=num_experts) == expert
            counts = tl.cumsum(is_mine.to(tl.int32), 0)
            tl.store(pairs + before + counts - 1, at, mask=is_mine)
            before += tl.sum(is_mine.to(tl.int32), 0)


@triton.jit
def find_block(starts, block, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the expert of a block of pairs, and how many blocks the expert has before it. Behind the last block the expert is
    `num_experts` or more."""
    index = tl.arange(0, EXPERTS)
    is_expert = index < num_experts
    first = tl.load(starts + index, mask=is_expert, other=0)
    end = tl.load(starts + index + 1, mask=is_expert, other=0)
    num_blocks = (end - first + BLOCK_M - 1) // BLOCK_M
    is_before = tl.cumsum(num_blocks, 0) <= block
    return tl.sum(is_before.to(tl.int32), 0), block - tl.sum(tl.where(is_before, num_blocks, 0), 0)


@triton.jit
def float_sums(
    weights, inputs, is_row, in_features, ELEMENT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products with weights in floats, float32 [BLOCK_N, BLOCK_M]. `weights` [BLOCK_N, 1] and `inputs` [1, BLOCK_M] point to
    the first input features."""
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if EVEN_K:
            w = tl.load(weights + start + inner[None, :])
            xs = tl.load(inputs + start + inner[:, None], mask=is_row, other=0.0)
        else:
            is_there = start + inner < in_features
            w = tl.load(weights + start + inner[None, :], mask=is_there[None, :], other=0.0)
            xs = tl.load(inputs + start + inner[:, None], mask=is_there[:, None] & is_row, other=0.0)
        total = tl.dot(w.to(ELEMENT), xs, total, input_precision="ieee")
    return total


@triton.jit
def integer_sums(
    values, scales, offsets, inputs, is_row, features, num_groups, out_features, scale_stride, ELEMENT: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same with weights of 4 or 8 bits; see `weight_only_kernel`."""
    BYTES: tl.constexpr = GROUP * BITS // 8
    inner = tl.arange(0, BYTES)
    stored = values + features.to(tl.int64)[:, None] * BYTES + inner[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for group in range(num_groups):
        narrow_scale, narrow_offset = load_scales(scales, offsets, group, scale_stride, features, HAS_OFFSETS)
        scale, offset = widened(narrow_scale, narrow_offset, BITS, HAS_OFFSETS)
        value = tl.load(stored + tl.cast(group, tl.int64) * out_features * BYTES)
        first_part = (value & 15) if BITS == 4 else value
        w = (first_part.to(tl.float32) * scale[:, None] - offset[:, None]).to(ELEMENT)
        xs = tl.load(inputs + group * GROUP + inner[:, None], mask=is_row, other=0.0)
        total = tl.dot(w, xs, total, input_precision="ieee")
        if BITS == 4:
            w = ((value >> 4).to(tl.float32) * scale[:, None] - offset[:, None]).to(ELEMENT)
            xs = tl.load(inputs + group * GROUP + BYTES + inner[:, None], mask=is_row, other=0.0)
            total = tl.dot(w, xs, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["per_row"])
def experts_kernel(
    x,
    values,
    scales,
    offsets,
    factors,
    bias,
    choices,
    starts,
    pairs,
    out,
    per_row,
    num_experts,
    out_features,
    in_features,
    scale_stride,
    x_stride,
    out_stride,
    IS_DOWN: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """See the module docstring. With IS_DOWN, x has a row for each pair, in the order of `pairs`, and out a row for each pair
    in the order of the choices; else x has a row for each token, and out has the order of `pairs`."""
    expert, block = find_block(starts, tl.program_id(1), num_experts, EXPERTS, BLOCK_M)
    if expert < num_experts:
        places = tl.load(starts + expert) + block * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = places < tl.load(starts + expert + 1)
        pair = tl.load(pairs + places, mask=is_row, other=0)
        features = tile_features(out_features, GATE, BLOCK_N)
        from_rows = places if IS_DOWN else pair // per_row
        inputs = x + from_rows.to(tl.int64)[None, :] * x_stride
        wide = expert.to(tl.int64)
        ELEMENT: tl.constexpr = x.dtype.element_ty
        if BITS == 0:
            weights = values + wide * out_features * in_features + features.to(tl.int64)[:, None] * in_features
            total = float_sums(
                weights, inputs, is_row[None, :], in_features, ELEMENT, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K
            )
            if HAS_SCALES:
                total *= tl.load(scales + wide * out_features + features)[:, None]
        else:
            num_groups = in_features // BLOCK_K
            scale_rows = num_groups if scale_stride > 0 else 1
            of_expert = wide * scale_rows * out_features
            total = integer_sums(
                values + wide * num_groups * out_features * (BLOCK_K * BITS // 8), scales + of_expert, offsets + of_expert,
                inputs, is_row[None, :], features, num_groups, out_features, scale_stride, ELEMENT, BITS, BLOCK_K,
                HAS_OFFSETS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            total *= tl.load(factors + expert)
        if HAS_BIAS:
            total += tl.load(bias + wide * out_features + features).to(tl.float32)[:, None]
        NUM_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATE != 0 else BLOCK_N
        result = total
        if GATE != 0:
            gate, up = tl.split(tl.permute(tl.reshape(total, [NUM_COLUMNS, 2, BLOCK_M]), [0, 2, 1]))
            result = gated(gate, up, GATE)
        if IS_DOWN:
            weight = tl.load(choices + pair * 2 + 1, mask=is_row, other=0).to(tl.float32, bitcast=True)
            result *= weight[None, :]
        columns = tl.program_id(0) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
        to_rows = pair if IS_DOWN else places
        to = out + to_rows.to(tl.int64)[None, :] * out_stride + columns[:, None]
        is_column = columns < (out_features // 2 if GATE != 0 else out_features)
        tl.store(to, result.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["per_row"])
def add_experts_kernel(results, out, per_row, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < size
    total = tl.load(results + row * per_row * size + columns, mask=is_there, other=0.0)
    for place in range(1, per_row):
        total += tl.load(results + (row * per_row + place) * size + columns, mask=is_there, other=0.0)
    tl.store(out + row * size + columns, total.to(out.dtype.element_ty), mask=is_there)


class ExpertLayer:
    """The experts of a layer.

    Args:
        gate_up, down: the weights of the experts that a router chooses from.
        gate: one of `MLP_GATES`.
        shared: computes the shared expert, if there is one: rows of x -> float32 [num_tokens, hidden_size].
    """

    def __init__(
        self, gate_up: ExpertWeights, down: ExpertWeights, gate: str, shared: Callable[[Tensor], Tensor] | None
    ) -> None:
        assert gate_up.num_experts == down.num_experts and gate_up.out_features == 2 * down.in_features
        assert gate_up.in_features == down.out_features
        self._gate_up, self._down, self._gate, self._shared = gate_up, down, gate, shared

    def __call__(self, hidden: Tensor, choices: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], and its choices (kernels/expert_choice.py) -> the same shape and dtype."""
        (num_tokens, hidden_size), per_row = hidden.shape, choices.shape[1]
        assert hidden.stride(1) == 1 and choices.shape == (num_tokens, per_row, 2) and choices.is_contiguous()
        out = torch.empty((num_tokens, hidden_size), dtype=hidden.dtype, device=hidden.device)
        if num_tokens == 0:
            return out
        num_experts, num_pairs = self._gate_up.num_experts, num_tokens * per_row
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=hidden.device)
        pairs = torch.empty(num_pairs, dtype=torch.int32, device=hidden.device)
        sort_pairs_kernel[(num_experts + 1,)](
            choices, starts, pairs, num_pairs, num_experts, BLOCK=_PAIRS_AT_ONCE, num_warps=4
        )
        num_routed = num_pairs - (0 if self._shared is None else num_tokens)
        order = choices, starts, pairs
        inner = torch.empty((num_routed, self._down.in_features), dtype=hidden.dtype, device=hidden.device)
        multiply_sorted(hidden, self._gate_up, order, inner, num_routed, gate=self._gate)
        results = torch.empty((num_tokens, per_row, hidden_size), dtype=torch.float32, device=hidden.device)
        multiply_sorted(inner, self._down, order, results.view(num_pairs, hidden_size), num_routed, gate=None)
        if self._shared is not None:
            weights = choices.view(torch.float32)[:, -1, 1:]
            torch.mul(self._shared(hidden), weights, out=results[:, -1])
        grid = num_tokens, triton.cdiv(hidden_size, _ADDED_AT_ONCE)
        add_experts_kernel[grid](results, out, per_row, hidden_size, BLOCK=_ADDED_AT_ONCE, num_warps=4)
        return out


def multiply_sorted(
    x: Tensor,
    weights: ExpertWeights,
    order: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    num_pairs: int,
    *,
    gate: str | None,
    tile: ExpertTile | None = None,
) -> None:
    """One launch of `experts_kernel`: of gate and up if there is a gate, else of down.

    `order`: the choices, and what `sort_pairs_kernel` writes: starts int32 [num_experts + 1], pairs int32 [num_pairs].
    """
    choices, starts, pairs = order
    tile = tile or expert_tile(num_pairs, weights, x.dtype)
    num_blocks = num_pairs // tile.block_m + min(weights.num_experts, num_pairs)
    unused = weights.values
    experts_kernel[(triton.cdiv(weights.out_features, tile.block_n), num_blocks)](
        x,
        weights.values,
        unused if weights.scales is None else weights.scales,
        (unused if weights.scales is None else weights.scales) if weights.offsets is None else weights.offsets,
        unused if weights.factors is None else weights.factors,
        unused if weights.bias is None else weights.bias,
        choices,
        starts,
        pairs,
        out,
        choices.shape[1],
        weights.num_experts,
        weights.out_features,
        weights.in_features,
        weights.scale_stride,
        x.stride(0),
        out.stride(0),
        IS_DOWN=gate is None,
        HAS_SCALES=weights.scales is not None,
        HAS_OFFSETS=weights.offsets is not None,
        HAS_BIAS=weights.bias is not None,
        GATE=GATE_CODES[gate],
        BITS=weights.bits,
        EVEN_K=weights.in_features % tile.block_k == 0,
        EXPERTS=triton.next_power_of_2(weights.num_experts),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
