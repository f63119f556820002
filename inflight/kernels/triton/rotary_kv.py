"""A Triton kernel that norms and rotates queries and keys, and writes keys and values to the cache, in one pass.

It computes in float32 and rounds once at the end. A cache in float8_e4m3fn holds the elements without a scale. Numbers above
448 or below -448, the range of this dtype, become ±448. Infinities and NaN become NaN, so that results show the error.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_HEADS = 8
FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def _store(pointers, x, keep):
    if pointers.dtype.element_ty == tl.float8e4nv:
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -FLOAT8_MAX), FLOAT8_MAX), float("nan"))
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["positions", "block_table", "token_slots", "table_stride"])
def rotary_kv_kernel(
    heads,  # [num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM], tokens `heads_stride` elements apart
    weight,  # [num_heads + num_kv_heads, HEAD_DIM], the weights of the norm
    cos,  # [num_tokens, HEAD_DIM]
    sin,  # [num_tokens, HEAD_DIM], with the sign of the rotation
    query,  # [num_tokens, num_heads, HEAD_DIM], written
    cache,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], written; blocks `block_stride` elements apart
    block_table,  # int32 [num_slots, max_blocks]
    token_slots,  # int32 [num_tokens]
    positions,  # int32 [num_tokens]
    heads_stride,
    block_stride,
    table_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """A program computes BLOCK_H heads of one token. It loads the halves of a head separately, because it rotates pairs of
    elements, one from each half."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_HALF)
    in_half = (d < HALF)[None, :]
    is_query = (h < NUM_HEADS)[:, None]
    is_rotated = (h < NUM_HEADS + NUM_KV_HEADS)[:, None]
    inside = (h < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half
    source = heads + token * heads_stride + h[:, None] * HEAD_DIM + d[None, :]
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    x, y = a, b
    if HAS_NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weights = weight + h[:, None] * HEAD_DIM + d[None, :]
        x = x * factor * tl.load(weights, mask=is_rotated & in_half, other=0.0).to(tl.float32)
        y = y * factor * tl.load(weights + HALF, mask=is_rotated & in_half, other=0.0).to(tl.float32)
    if HAS_ROTATION:
        angle = token * HEAD_DIM + d[None, :]
        cos_x = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
        sin_x = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
        cos_y = tl.load(cos + angle + HALF, mask=in_half, other=0.0).to(tl.float32)
        sin_y = tl.load(sin + angle + HALF, mask=in_half, other=0.0).to(tl.float32)
        x, y = x * cos_x + y * sin_x, y * cos_y + x * sin_y
    x = tl.where(is_rotated, x, a)
    y = tl.where(is_rotated, y, b)

    to_query = query + (token * NUM_HEADS + h[:, None]) * HEAD_DIM + d[None, :]
    _store(to_query, x, is_query & in_half)
    _store(to_query + HALF, y, is_query & in_half)
    position = tl.load(positions + token)
    slot = tl.load(token_slots + token).to(tl.int64)
    block_id = tl.load(block_table + slot * table_stride + position // BLOCK_SIZE).to(tl.int64)
    # A block has the keys of all heads, then the values of all heads. This is also their order in `heads`.
    cell = ((h - NUM_HEADS) * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * HEAD_DIM + d[None, :]
    to_cache = cache + block_id * block_stride + cell
    _store(to_cache, x, inside & (h >= NUM_HEADS)[:, None])
    _store(to_cache + HALF, y, inside & (h >= NUM_HEADS)[:, None])


def rotary_kv(
    heads: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    cos_sin: tuple[Tensor, Tensor] | None,
    kv_cache: Tensor,
    block_table: Tensor,
    token_slots: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
) -> Tensor:
    """Norms and rotates queries and keys. Writes keys and values to the cache: token i has position `positions[i]` in the
    sequence whose blocks are in line `token_slots[i]` of `block_table`. Returns the queries, [num_tokens, num_heads, head_dim].

    heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim], its heads contiguous; head_dim is even. If `heads` has only the
    queries, nothing is written. norm_weight [num_heads + num_kv_heads, head_dim], None for no norm. cos and sin [num_tokens,
    head_dim]; `cos_sin` is None for no rotation. For kv_cache and block_table see `attention_decode`. token_slots and
    positions: int32 [num_tokens].
    """
    num_tokens, num_all, head_dim = heads.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    assert heads.stride()[1:] == (head_dim, 1) and head_dim % 2 == 0
    num_new = (num_all - num_heads) // 2
    assert num_all == num_heads + 2 * num_new and num_new in (0, num_kv_heads)
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    cos, sin = cos_sin or (heads, heads)  # without cos_sin the kernel reads neither cos nor sin
    assert cos_sin is None or (cos.is_contiguous() and sin.is_contiguous())
    rotary_kv_kernel[num_tokens, triton.cdiv(num_all, BLOCK_HEADS)](
        heads,
        heads if norm_weight is None else norm_weight,
        cos,
        sin,
        query,
        kv_cache,
        block_table,
        token_slots,
        positions,
        heads.stride(0),
        kv_cache.stride(0),
        block_table.stride(0),
        norm_eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_new,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_NORM=norm_weight is not None,
        HAS_ROTATION=cos_sin is not None,
        BLOCK_H=BLOCK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
    )
    return query
