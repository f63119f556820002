"""Quantizes rows to float8_e4m3fn in Triton, with one scale per row, for matrix products in fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.triton.norm import num_warps

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
_LEAST = 1e-12  # least divisor, so that a row of zeros stays zero


@triton.jit
def quantize_rows_kernel(
    x, out, scales, x_stride, size, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr
):
    """`BLOCK`: a power of two, at least `size`. The scale of a row with an infinity or a NaN is NaN."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_there = columns < size
    wide = tl.load(x + row * x_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    is_finite = tl.min((tl.abs(wide) < float("inf")).to(tl.int32), axis=0) == 1  # tl.max can ignore a NaN
    scale = tl.where(is_finite, tl.maximum(tl.max(tl.abs(wide), axis=0), LEAST) / LARGEST, float("nan"))
    tl.store(scales + row, scale)
    # rounding can make the quotient a little larger than LARGEST
    scaled = tl.minimum(tl.maximum(wide / scale, -LARGEST), LARGEST)
    tl.store(out + row * size + columns, scaled.to(out.dtype.element_ty), mask=is_there)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [num_rows, size] -> float8_e4m3fn [num_rows, size] and scales, float32 [num_rows, 1]. The rows of x may be strided.

    The values times the scales are x, rounded. If a row has an infinity or a NaN, its scale is NaN.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows > 0:
        block = triton.next_power_of_2(size)
        quantize_rows_kernel[(num_rows,)](
            x,
            out,
            scales,
            x.stride(0),
            size,
            LARGEST=LARGEST,
            LEAST=_LEAST,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return out, scales
