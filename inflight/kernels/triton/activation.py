"""The activation of a gated MLP, silu(gate) * up (arXiv:2002.05202), in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def gated(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, out_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, gated(gate, up).to(out.dtype.element_ty), mask=is_there)


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """x [num_rows, 2 * size] -> out [num_rows, size], rounded once. A row of x has `gate`, then `up`. Rows may be strided."""
    num_rows, size = out.shape
    assert x.shape == (num_rows, 2 * size) and x.stride(1) == 1 and out.stride(1) == 1
    if num_rows > 0:
        grid = (num_rows, triton.cdiv(size, BLOCK))
        silu_and_mul_kernel[grid](x, out, x.stride(0), out.stride(0), size, BLOCK=BLOCK, num_warps=4)
