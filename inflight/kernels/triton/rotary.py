"""Cosines and sines of rotary embedding in Triton: one kernel for the tokens of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # pairs of elements per program, one for each thread


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
    angle = position * tl.load(frequencies + d, mask=is_there, other=0.0)
    # These are CUDA's precise functions, as in torch. They are accurate for angles of any size.
    x, y = tl.cos(angle) * scale, tl.sin(angle) * scale
    first = token * (2 * HALF) + d
    kind = cos.dtype.element_ty
    tl.store(cos + first, x.to(kind), mask=is_there)
    tl.store(cos + first + HALF, x.to(kind), mask=is_there)
    tl.store(sin + first, (-y).to(kind), mask=is_there)
    tl.store(sin + first + HALF, y.to(kind), mask=is_there)


def cos_and_sin(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `LayerOps.cos_and_sin`."""
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
