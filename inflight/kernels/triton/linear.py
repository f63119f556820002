"""The product x @ weight.T for few rows, in Triton. It reads every weight once, with enough programs to keep the memory busy.

The weights are the left operand of the tensor cores, which has at least 64 rows on Hopper. The rows of x are the right operand,
which needs only 8 columns, so a product with few rows wastes little work.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gate import GATE_CODES
from inflight.kernels.triton.split_k import SplitKScratch, TileConfig, block_m, finish_tile, tile_features

# (block_n, block_k, num_warps, num_stages): each program loads 24 to 64 KB of weights at once
TILES = (
    (16, 512, 4, 3),
    (32, 128, 4, 6),
    (32, 256, 4, 4),
    (64, 128, 4, 4),
    (64, 256, 4, 3),
    (128, 64, 4, 4),
    (128, 128, 8, 3),
)
FP8_TILES = ((16, 512, 4, 3), (32, 256, 4, 5), (64, 128, 4, 5), (64, 256, 8, 4), (128, 128, 8, 4))
PROGRAMS = (1, 2)  # programs per multiprocessor; for three, the shared memory is too small with most tiles


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    partials,
    counters,
    num_rows,
    out_features,
    in_features,
    x_stride,
    out_stride,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each program computes a tile of output features over a split (a part) of the input features. `EVEN_K`: BLOCK_K divides
    in_features."""
    features = tile_features(out_features, GATE, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    is_row = (rows < num_rows)[None, :]
    per_split = tl.cdiv(tl.cdiv(in_features, BLOCK_K), tl.num_programs(1)) * BLOCK_K
    first = tl.program_id(1) * per_split
    inner = tl.arange(0, BLOCK_K)
    weights = weight + features.to(tl.int64)[:, None] * in_features + inner[None, :]
    inputs = x + rows.to(tl.int64)[None, :] * x_stride + inner[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(first, tl.minimum(first + per_split, in_features), BLOCK_K):
        if EVEN_K:
            w = tl.load(weights + start)
            xs = tl.load(inputs + start, mask=is_row, other=0.0)
        else:
            is_there = start + inner < in_features
            w = tl.load(weights + start, mask=is_there[None, :], other=0.0)
            xs = tl.load(inputs + start, mask=is_there[:, None] & is_row, other=0.0)
        total = tl.dot(w.to(x.dtype.element_ty), xs, total, input_precision="ieee")
    finish_tile(
        total, scales, bias, out, partials, counters, num_rows, out_features, out_stride,
        HAS_SCALES, HAS_BIAS, GATE, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: TileConfig,
    scratch: SplitKScratch,
    *,
    scales: Tensor | None = None,
    gate: str | None = None,
) -> None:
    """Computes x @ weight.T + bias. Writes it to `out` [num_rows, out_features], which has any float dtype.

    x [num_rows, in_features]; weight [out_features, in_features], contiguous, in x's dtype; bias [out_features]. The rows of x
    and `out` may be strided. `scratch` must have room for the product. If there are `scales`, float32 [out_features], the
    weight is in fp8 and row i is multiplied by scales[i]. `gate`: `out` is [num_rows, out_features / 2], and is gate(first
    half of the features) * second half.
    """
    (num_rows, in_features), out_features = x.shape, len(weight)
    assert (
        x.stride(1) == 1
        and out.stride(1) == 1
        and weight.is_contiguous()
        and out_features == out.shape[1] * (1 + (gate is not None))
    )
    assert weight.dtype == (x.dtype if scales is None else torch.float8_e4m3fn)
    linear_kernel[(triton.cdiv(out_features, config.block_n), config.num_splits)](
        x,
        weight,
        weight if scales is None else scales,
        weight if bias is None else bias,
        out,
        scratch.partials,
        scratch.counters,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        out.stride(0),
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        GATE=GATE_CODES[gate],
        EVEN_K=in_features % config.block_k == 0,
        BLOCK_M=block_m(num_rows),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def linear_configs(
    out_features: int,
    in_features: int,
    num_multiprocessors: int,
    tiles: Sequence[tuple[int, int, int, int]] = TILES,
    programs: Sequence[int] = PROGRAMS,
) -> list[TileConfig]:
    """The configurations to measure for a weight: each of `tiles`, with the numbers of splits that `split_counts` returns."""
    return [
        TileConfig(block_n=n, block_k=k, num_splits=splits, num_warps=num_warps, num_stages=num_stages)
        for n, k, num_warps, num_stages in tiles
        for splits in split_counts(
            triton.cdiv(out_features, n), triton.cdiv(in_features, k), num_multiprocessors, programs
        )
    ]


def split_counts(num_tiles: int, num_steps: int, num_multiprocessors: int, programs: Sequence[int]) -> list[int]:
    """Returns numbers of splits to measure, ascending. For each number n in `programs`, one number of splits is chosen so that
    about n programs run on each multiprocessor. A split has at least two of the `num_steps` blocks of input features, unless
    there is only one block."""
    most = max(1, num_steps // 2)
    return sorted({min(most, max(1, times * num_multiprocessors // num_tiles)) for times in programs})


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Computes the same as `linear` without scales and gate, with torch's own library, for any number of rows."""
    if out.dtype != x.dtype:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out=out)
