"""Paged attention in Triton for rows of any length: prompts, later chunks of prompts, single tokens, all in one batch. Rows
with one token may be left to attention_decode.py, which splits long ones over the device.

Rows are cut into tiles of BLOCK_Q tokens, and a tile has all the query heads of one key head:

    tokens      | row 0 ......... | row 1 | row 2 ............ |     num_tokens // BLOCK_Q + num_rows tiles are enough
    tiles       | 0    | 1   | 2  | 3     | 4    | 5    | 6    |     for any rows, so this is the size of the grid

The first tile of row r is tile query_start_loc[r] // BLOCK_Q + r. Some tiles have no tokens. One program computes the whole sum
over the keys that a tile sees, and takes them in blocks that begin at multiples of the block's size. So the result of a token
depends only on its own row, not on the batch or on how the row was cut into chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.triton.attention_tile import attend_keys, keys_end, softmax_end, softmax_start

ROWS_AT_ONCE = 256  # each program searches for the row of its tile, and compares so many rows at once
LEAST_SHARED_BYTES = 99 << 10  # shared memory per program on sm_86 and sm_89, the supported GPUs that have the least


@triton.jit
def row_of_tile(query_start_loc, num_rows, tile, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The row to which a tile belongs. Compares ROWS rows at once."""
    row = -1
    for first_row in range(0, num_rows, ROWS):
        r = first_row + tl.arange(0, ROWS)
        starts = tl.load(query_start_loc + r, mask=r < num_rows, other=0)
        row += tl.sum(((r < num_rows) & (starts // BLOCK_Q + r <= tile)).to(tl.int32), 0)
    return row


@triton.jit
def load_ends(ends, token, num_queries, first_query, BLOCK_Q: tl.constexpr):
    """Returns the ends of the queries `token`, and the smallest and the largest of the tile: they do not fall from one query
    to the next. `ends`: pointer to that of the row's first query."""
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    return (
        tl.load(ends + token, mask=token < num_queries, other=0),
        tl.load(ends + first_query),
        tl.load(ends + last_query),
    )


@triton.jit(
    do_not_specialize=["num_rows", "block_table", "slots", "seq_lens", "query_start_loc", "image_ends", "table_stride"]
)
def attention_mixed_kernel(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    cache,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], blocks `block_stride` elements apart
    output,  # as query
    block_table,  # int32 [num_slots, max_blocks]
    slots,  # int32 [num_rows]
    seq_lens,  # int32 [num_rows]
    query_start_loc,  # int32 [num_rows + 1]
    sinks,  # float32 [num_heads], if HAS_SINKS
    image_ends,  # int32 [num_tokens], if HAS_ENDS: each query sees the keys before this position
    num_rows,
    block_stride,
    table_stride,
    scale,
    NUM_KV_HEADS: tl.constexpr, PER_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_ENDS: tl.constexpr,
    LEAST_QUERIES: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Axis 0 has tiles and heads: other axes have at most 65,535. A row's last tiles have the most keys, so they start first.
    head = tl.program_id(0) % NUM_KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    row = row_of_tile(query_start_loc, num_rows, tile, ROWS, BLOCK_Q)
    row_start = tl.load(query_start_loc + row)
    num_queries = tl.load(query_start_loc + row + 1) - row_start
    first_query = (tile - row_start // BLOCK_Q - row) * BLOCK_Q  # the index, in the row, of the tile's first query
    if (first_query >= num_queries) | (num_queries < LEAST_QUERIES):
        return
    seq_len = tl.load(seq_lens + row)
    num_computed = seq_len - num_queries
    first_position = num_computed + first_query
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first_query + m // PER_HEAD
    inside = ((m < BLOCK_Q * PER_HEAD) & (token < num_queries))[:, None] & (d < HEAD_DIM)[None, :]
    index = (row_start + token) * (NUM_KV_HEADS * PER_HEAD) + head * PER_HEAD + m % PER_HEAD
    at = index.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(query + at, mask=inside, other=0.0)
    positions = num_computed + token

    # All queries of the tile see the keys in [unmasked_from, unmasked_to). The other keys in [first_key, end_key) need a mask.
    first_key = 0
    first_tile = 0
    end_key = keys_end(last_position, seq_len, WINDOW, IS_CAUSAL)
    unmasked_from = 0
    unmasked_to = keys_end(first_position, seq_len, WINDOW, IS_CAUSAL) // BLOCK_N * BLOCK_N
    ends = positions + 1
    if HAS_ENDS:
        ends, first_end, end_key = load_ends(image_ends + row_start, token, num_queries, first_query, BLOCK_Q)
        unmasked_to = first_end // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
        first_tile = first_key // BLOCK_N * BLOCK_N
        unmasked_from = tl.cdiv(tl.maximum(last_position + 1 - WINDOW, 0), BLOCK_N) * BLOCK_N
        unmasked_to = tl.maximum(unmasked_to, unmasked_from)
    keys = cache + head * BLOCK_SIZE * HEAD_DIM
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    block_ids = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    acc, largest, total = softmax_start(BLOCK_M, BLOCK_D)
    for phase in tl.static_range(0 if WINDOW > 0 else 1, 3):
        start = first_tile if phase == 0 else unmasked_from if phase == 1 else unmasked_to
        end = tl.minimum(unmasked_from, end_key) if phase == 0 else unmasked_to if phase == 1 else end_key
        acc, largest, total = attend_keys(
            acc, largest, total, q, positions, ends, start, end, first_key, end_key, keys, values, block_ids, block_stride,
            scale, WINDOW, SOFT_CAP, IS_CAUSAL, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, phase != 1,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # queries that are padding may have seen no key
    acc = softmax_end(acc, largest, total, sinks, head * PER_HEAD + m % PER_HEAD, HAS_SINKS)
    tl.store(output + at, acc.to(output.dtype.element_ty), mask=inside)


def tile_of(
    head_dim: int, dtype: torch.dtype, max_shared_bytes: int = LEAST_SHARED_BYTES, *, has_float8_cache: bool = False
) -> tuple[int, int, int, int]:
    """Returns (queries in a tile, keys in a tile, warps, stages). The number of queries is tokens times heads. Two stages are
    for block ids, the other stages are for keys and values.

    `max_shared_bytes`: shared memory that a program can use on the device, at least `LEAST_SHARED_BYTES`. With fewer queries in
    a tile, keys and values would be read more often than the second-level cache can deliver them. More queries would not fit
    the registers. Tiles for head_dim 512 were chosen by the registers and the shared memory that the compiler
    reports, without a measurement on a GPU.
    """
    if dtype == torch.float32:
        return (64, 32, 8, 2) if head_dim <= 64 else (32 if head_dim <= 256 else 16, 16, 8, 2)
    has_much = max_shared_bytes >= 132 << 10
    if head_dim <= 128:
        # GPUs with float8 and little shared memory (sm_89) convert keys and values in registers: 64 keys would not fit these.
        return 128, (32 if has_float8_cache and head_dim > 64 and not has_much else 64), 8, 5
    # With head_dim 256, a stage of keys and values takes 32 KiB.
    if head_dim <= 256:
        return 64, 32, 8, (5 if has_much else 4)
    return 32, (32 if max_shared_bytes >= 163 << 10 else 16), 8, 5


def attention_mixed(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    is_causal: bool = True,
    image_ends: Tensor | None = None,
    least_queries: int = 1,
    max_shared_bytes: int = LEAST_SHARED_BYTES,
) -> Tensor:
    """Computes the attention of the last tokens of each row. Their keys and values are already in the cache. Returns a tensor
    in the shape of `query`.

    query [num_tokens, num_heads, head_dim], contiguous. query_start_loc int32 [num_rows + 1]. If a token belongs to no row, its
    output is not set. `is_causal`: see `AttentionParams`. `image_ends` int32 [num_tokens]: each query sees the keys before this
    position, which does not fall from one query of a row to the next; None: a query sees nothing behind itself, if `is_causal`
    is set. `least_queries`: rows with fewer tokens are not computed. `max_shared_bytes`: see `tile_of`. For the other arguments
    see `attention_decode`.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    num_rows = len(seq_lens)
    block_m, block_n, num_warps, num_stages = tile_of(
        head_dim, query.dtype, max_shared_bytes, has_float8_cache=kv_cache.element_size() == 1
    )
    constants = mixed_constants(num_heads, num_kv_heads, head_dim, block_size, block_m, block_n)
    assert query.is_contiguous() and scale > 0
    output = torch.empty_like(query)
    num_tiles = num_tokens // constants["BLOCK_Q"] + num_rows
    attention_mixed_kernel[(num_tiles * num_kv_heads,)](
        query,
        kv_cache,
        output,
        block_table,
        slots,
        seq_lens,
        query_start_loc,
        query if sinks is None else sinks,
        seq_lens if image_ends is None else image_ends,
        num_rows,
        kv_cache.stride(0),
        block_table.stride(0),
        scale,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap or 0.0,
        HAS_SINKS=sinks is not None,
        IS_CAUSAL=is_causal,
        HAS_ENDS=image_ends is not None,
        LEAST_QUERIES=least_queries,
        **constants,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return output


def mixed_constants(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, block_m: int, block_n: int
) -> dict[str, int]:
    """Constants of the kernel that follow from shapes."""
    per_head = num_heads // num_kv_heads
    block_m = max(block_m, triton.next_power_of_2(per_head))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "PER_HEAD": per_head,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "ROWS": ROWS_AT_ONCE,
        "BLOCK_Q": block_m // per_head,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
    }
