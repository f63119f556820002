"""RMSNorm (arXiv:1910.07467) in Triton: each program computes a row, and adds the residual first if there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`BLOCK`: a power of two, at least `size`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_there = columns < size
    summed = tl.load(x + row * x_stride + columns, mask=is_there, other=0.0)
    if HAS_RESIDUAL:
        stream = residual + row * residual_stride + columns
        before = tl.load(stream, mask=is_there, other=0.0)
        # the norm is computed from the stored sum, so the sum is rounded first
        summed = (summed.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(stream, summed, mask=is_there)
    wide = summed.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weights = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, (wide * scale * weights).to(out.dtype.element_ty), mask=is_there)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Returns the norm of each row of x [num_rows, size]. If there is a `residual`, x is first added to it in place, and the
    norm is computed from the sum. The rows of x and of `residual` may be strided."""
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1 and weight.is_contiguous() and (residual is None or residual.stride(1) == 1)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=num_warps(block),
    )
    return out


def num_warps(block: int) -> int:
    """The number of warps for a row of `block` elements: each thread has 8 elements (16 bytes of a 16-bit type). At most 16."""
    return min(16, max(1, block // 256))
