"""Triton kernels between matrix products: RMSNorm, the angles of rotary embedding, the gate of an MLP, rows in fp8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gate import GATE_CODES
from inflight.kernels.layer_ops import TorchLayerOps

GATED_BLOCK = 1024  # elements per program of `multiply_gate_kernel`
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448, the largest number in fp8
_LEAST = 1e-12  # least divisor, so that a row of zeros stays zero
BLOCK = 128  # pairs of elements per program of `cos_and_sin_kernel`, one for each thread


class TritonLayerOps(TorchLayerOps):
    """Norms are rounded once. The Triton attention backend rotates heads itself. For other backends, the methods of
    `TorchLayerOps` rotate them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, None, weight, eps)

    def add_and_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(delta, residual, weight, eps)

    def cos_and_sin(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        num_tokens, head_dim = len(positions), len(frequencies)
        assert positions.is_contiguous() and frequencies.is_contiguous() and frequencies.dtype == torch.float32
        cos = torch.empty((num_tokens, head_dim), dtype=dtype, device=positions.device)
        sin = torch.empty_like(cos)
        num_pairs = num_tokens * head_dim // 2
        if num_pairs > 0:
            cos_and_sin_kernel[(triton.cdiv(num_pairs, BLOCK),)](
                positions, frequencies, cos, sin, scale, num_pairs, HALF=head_dim // 2, BLOCK=BLOCK, num_warps=4
            )
        return cos, sin


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, size, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program computes a row. If there is a residual, the program adds it first. `BLOCK`: a power of two, at least
    `size`."""
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


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """If there is a `residual`, x is first added to it in place, and the norm is computed from the sum."""
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


@triton.jit(do_not_specialize=["positions", "num_pairs"])
def cos_and_sin_kernel(
    positions,  # int32 [num_tokens]
    frequencies,  # float32 [2 * HALF]; only the first half is read
    cos,  # [num_tokens, 2 * HALF], written
    sin,  # as cos
    scale,
    num_pairs,  # num_tokens * HALF
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = pair < num_pairs
    token, d = pair // HALF, pair % HALF
    position = tl.load(positions + token, mask=is_there, other=0).to(tl.float32)
    frequency = tl.load(frequencies + d, mask=is_there, other=0.0)
    angle, factor = position * frequency, tl.where(frequency == 0.0, 1.0, scale)
    # These are CUDA's precise functions, as in torch. They are accurate for angles of any size.
    x, y = tl.cos(angle) * factor, tl.sin(angle) * factor
    first = token * (2 * HALF) + d
    kind = cos.dtype.element_ty
    tl.store(cos + first, x.to(kind), mask=is_there)
    tl.store(cos + first + HALF, x.to(kind), mask=is_there)
    tl.store(sin + first, (-y).to(kind), mask=is_there)
    tl.store(sin + first + HALF, y.to(kind), mask=is_there)


@triton.jit
def gelu(x):
    """As `gelu_exact` of kernels/cpu/simd.h, where the numbers are from. 1 + erf(x) would lose the digits of a small sum."""
    size = tl.abs(x)
    t = 1.0 / (1.0 + 0.3 * size)
    p = ((0.0360364541 * t - 0.15871419) * t + 0.20896551) * t - 0.0560966432
    p = (((p * t + 0.129843771) * t + 0.0995229632) * t + 0.120816909) * t + 0.119625166
    return tl.maximum(x, 0.0) - size * (t * p * tl.exp(-0.5 * x * x))


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """`GATE`: see GATE_CODES. The tanh form of GELU, x / 2 * (1 + tanh(z)), is x * sigmoid(2z)."""
    tl.static_assert(GATE == 1 or GATE == 2 or GATE == 4 or GATE == 5, "no kernel for this gate")
    if GATE == 4:  # see kernels/swiglu_oai.py; NaN stays NaN
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        activated = gate / (1.0 + tl.exp(-1.702 * gate))
    elif GATE == 5:
        activated = gelu(gate)
    else:
        z = gate if GATE == 1 else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-z))
    return activated * up


@triton.jit
def multiply_gate_kernel(x, out, x_stride, out_stride, size, GATE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, gated(gate, up, GATE).to(out.dtype.element_ty), mask=is_there)


def multiply_gate(x: Tensor, out: Tensor, activation: str) -> None:
    """The activation of a gated MLP, activation(gate) * up (arXiv:2002.05202), rounded once.

    x [num_rows, 2 * size] -> out [num_rows, size]. A row of x has `gate`, then `up`. Rows may be strided.
    """
    num_rows, size = out.shape
    assert x.shape == (num_rows, 2 * size) and x.stride(1) == 1 and out.stride(1) == 1
    if num_rows > 0:
        grid = (num_rows, triton.cdiv(size, GATED_BLOCK))
        gate = GATE_CODES[activation]
        multiply_gate_kernel[grid](x, out, x.stride(0), out.stride(0), size, GATE=gate, BLOCK=GATED_BLOCK, num_warps=4)


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
    """Quantizes rows for matrix products in fp8, with one scale per row.

    x [num_rows, size] -> float8_e4m3fn [num_rows, size] and scales, float32 [num_rows, 1]. The rows of x may be strided.

    The values times the scales are x, rounded. If a row has an infinity or a NaN, its scale is NaN.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows > 0:
        block = triton.next_power_of_2(size)
        quantize_rows_kernel[(num_rows,)](
            x, out, scales, x.stride(0), size, LARGEST=LARGEST, LEAST=_LEAST, BLOCK=block, num_warps=num_warps(block)
        )
    return out, scales
