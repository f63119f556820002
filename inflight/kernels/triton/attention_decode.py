"""Paged attention in Triton for rows with one query token: one kernel splits the keys and combines the partial results. Other
rows of the batch may have more tokens: the kernel leaves them to attention_mixed.py.

A split is a range of the keys of a row. Each program computes one split for one key head. A row has one split if it is short,
or if the batch is large and the row is not very long. If a row has several splits, each program stores its result in
`partials`. A counter for the row and head shows which program ends last. The last program combines the results and resets the
counter. It combines in the order of the splits, so the result does not depend on which program is the last.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.triton.attention_tile import attend_keys, softmax_end, softmax_start

PROGRAMS_PER_SM = 3  # programs that a multiprocessor of sm_90 can run at once, limited by its shared memory (`tile_of`)
# The most registers per thread. With this limit, a multiprocessor has enough registers for three programs. The kernel still
# spills none, even with float8.
MAX_REGISTERS = 168
MIN_SPLIT_TOKENS = 128  # a shorter split saves less time than starting a program and combining the results takes
LONG_SPLIT_TOKENS = 4096  # least size of the splits of a long row, if the other rows are short and fill the device
LONG_SPLITS = 4  # most splits of such a long row
MAX_PROGRAMS_PER_SM = 32  # most programs in a grid with several splits, divided by the number of multiprocessors
COMBINED_PER_THREAD = 32  # values of partial results that a thread loads at once


@dataclass(frozen=True, slots=True)
class Splits:
    """Limits for the number of splits of a row. A row has at most `usual` splits, unless these would be longer than
    LONG_SPLIT_TOKENS. A row that is so long has at most `most` splits, and each of them, except the last, has at least
    LONG_SPLIT_TOKENS keys."""

    usual: int
    most: int


def num_splits(num_rows: int, num_kv_heads: int, max_seq_len: int, num_multiprocessors: int) -> Splits:
    """Returns as many splits as fit the device at once, but no more than a sequence of `max_seq_len` tokens can use.

    If `most` is more than 1, `num_rows * num_kv_heads * most` is at most the result of `max_partials`.
    """
    pairs = num_rows * num_kv_heads
    usual = max(1, min(PROGRAMS_PER_SM * num_multiprocessors // pairs, -(-max_seq_len // MIN_SPLIT_TOKENS)))
    # A long row among many short rows gets several programs for each head. The grid of a recorded graph is fixed, so it has
    # programs for such a row even if a batch has no such row. The programs without keys run last. 1000 of them take an
    # estimated 2 us. MAX_PROGRAMS_PER_SM limits their number to about 3000.
    longest = min(LONG_SPLITS, max_seq_len // LONG_SPLIT_TOKENS, max_partials(num_multiprocessors) // pairs)
    return Splits(usual, max(usual, longest))


def max_partials(num_multiprocessors: int) -> int:
    return MAX_PROGRAMS_PER_SM * num_multiprocessors


@triton.jit
def combine(
    partials,
    largest_scores,
    totals,
    output,
    first_part,
    num_parts,
    first_head,
    sinks,
    PER_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COMBINED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combines the results of `num_parts` splits into heads `[first_head, first_head + PER_HEAD)` of `output`. The results
    begin at row `first_part` of `partials`. `sinks`: pointer to the sink of the first of these heads.

    A thread reads the same elements of every result, so threads do not wait for each other. A thread loads COMBINED results at
    once. The loads bypass the first-level cache, which does not see what other multiprocessors write.
    """
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    source = tl.minimum(h, PER_HEAD - 1)  # indices beyond the last head read the last head, and are not stored
    in_head = (d < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    largest = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for first in range(0, num_parts, COMBINED):
        for i in tl.static_range(COMBINED):
            there = first + i < num_parts
            rows = first_part + (first + i) * PER_HEAD + source
            at = rows[:, None] * HEAD_DIM + d[None, :]
            their_largest = tl.load(largest_scores + rows, mask=there, other=float("-inf"), cache_modifier=".cg")
            their_total = tl.load(totals + rows, mask=there, other=0.0, cache_modifier=".cg")
            theirs = tl.load(partials + at, mask=there & in_head, other=0.0, cache_modifier=".cg")
            highest = tl.maximum(largest, their_largest)  # not -inf, because the first part is never empty
            fade = tl.exp2(largest - highest)
            weight = tl.exp2(their_largest - highest)
            acc = acc * fade[:, None] + theirs * weight[:, None]
            total = total * fade + their_total * weight
            largest = highest
    to = (first_head + h)[:, None] * HEAD_DIM + d[None, :]
    acc = softmax_end(acc, largest, total, sinks, source, HAS_SINKS)
    tl.store(output + to, acc.to(output.dtype.element_ty), mask=(h < PER_HEAD)[:, None] & in_head)


@triton.jit
def single_token(query_start_loc, row, seq_len):
    """Returns (place of the row's token in the flat batch, `seq_len`). The length is 0 if the row has not just one token."""
    token = tl.load(query_start_loc + row)
    is_single = tl.load(query_start_loc + row + 1) - token == 1
    return tl.where(is_single, token, 0).to(tl.int64), tl.where(is_single, seq_len, 0)


@triton.jit
def tiles_of_row(
    seq_len, usual_splits, max_splits, WINDOW: tl.constexpr, MIN_TILES: tl.constexpr, LONG_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns (the first key that the row sees, the first key of its first tile, tiles in a split, splits)."""
    first_key = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0
    first_tile = first_key // BLOCK_N * BLOCK_N
    num_tiles = tl.cdiv(seq_len - first_tile, BLOCK_N)
    tiles_a_split = tl.maximum(tl.minimum(tl.cdiv(num_tiles, usual_splits), LONG_TILES), tl.cdiv(num_tiles, max_splits))
    tiles_a_split = tl.maximum(tiles_a_split, MIN_TILES)
    return first_key, first_tile, tiles_a_split, tl.cdiv(num_tiles, tiles_a_split)


@triton.jit(do_not_specialize=["block_table", "slots", "seq_lens", "query_start_loc", "table_stride", "usual_splits"])
def attention_decode_kernel(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    cache,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], blocks `block_stride` elements apart
    output,  # as query
    block_table,  # int32 [num_slots, max_blocks]
    slots,  # int32 [num_rows]
    seq_lens,  # int32 [num_rows]
    query_start_loc,  # int32 [num_rows + 1], if HAS_STARTS: only rows with one token are computed; if not, all have one
    sinks,  # float32 [num_heads], if HAS_SINKS
    partials,  # float32 [num_rows * num_kv_heads * splits, PER_HEAD, HEAD_DIM]
    partial_sums,  # float32 [2, num_rows * num_kv_heads * splits, PER_HEAD]: largest scores, sums of weights
    counters,  # int32 [num_rows * num_kv_heads], zeros
    block_stride,
    table_stride,
    usual_splits,
    scale,
    PER_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_STARTS: tl.constexpr, MIN_TILES: tl.constexpr, LONG_TILES: tl.constexpr,
    COMBINED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, max_splits = tl.num_programs(1), tl.num_programs(2)
    m = tl.arange(0, BLOCK_M)  # query heads of this key head
    d = tl.arange(0, BLOCK_D)
    inside = (m < PER_HEAD)[:, None] & (d < HEAD_DIM)[None, :]
    pair = row * num_kv_heads + head
    token, seq_len = row, tl.load(seq_lens + row)
    if HAS_STARTS:
        token, seq_len = single_token(query_start_loc, row, seq_len)
    first_head = (
        token * num_kv_heads + head
    ) * PER_HEAD  # in `query` and `output`: the lines are all heads of all tokens
    at = (first_head + m)[:, None] * HEAD_DIM + d[None, :]
    # seq_len, slot and q are loaded before the test for an empty split. So the program waits for memory once, not three times.
    slot = tl.load(slots + row)
    q = tl.load(query + at, mask=inside, other=0.0)
    first_key, first_tile, tiles_a_split, used_splits = tiles_of_row(
        seq_len, usual_splits, max_splits, WINDOW, MIN_TILES, LONG_TILES, BLOCK_N
    )
    # Slots are never negative. But without `slot < 0` here, the compiler would load `slot` only after this test.
    if (split >= used_splits) | (slot < 0):
        return

    keys = cache + head * BLOCK_SIZE * HEAD_DIM
    start = first_tile + split * tiles_a_split * BLOCK_N
    acc, largest, total = softmax_start(BLOCK_M, BLOCK_D)
    acc, largest, total = attend_keys(
        acc, largest, total, q, tl.full([BLOCK_M], 0, tl.int32) + (seq_len - 1), tl.full([BLOCK_M], 0, tl.int32) + seq_len,
        start, tl.minimum(start + tiles_a_split * BLOCK_N, seq_len), first_key, seq_len,
        keys, keys + num_kv_heads * BLOCK_SIZE * HEAD_DIM, block_table + slot.to(tl.int64) * table_stride,
        block_stride, scale, WINDOW, SOFT_CAP, True, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip
    sinks += head * PER_HEAD
    if used_splits == 1:
        attended = softmax_end(acc, largest, total, sinks, tl.minimum(m, PER_HEAD - 1), HAS_SINKS)
        tl.store(output + at, attended.to(output.dtype.element_ty), mask=inside)
        return

    first_part = pair * max_splits * PER_HEAD
    totals = partial_sums + tl.num_programs(0) * num_kv_heads * max_splits * PER_HEAD
    own = first_part + split * PER_HEAD + m
    tl.store(partials + own[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
    tl.store(partial_sums + own, largest, mask=m < PER_HEAD)
    tl.store(totals + own, total, mask=m < PER_HEAD)
    tl.debug_barrier()  # all stores of this program come before the atomic addition
    if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") != used_splits - 1:
        return

    tl.store(counters + pair, 0)
    combine(
        partials, partial_sums, totals, output, first_part, used_splits, first_head, sinks,
        PER_HEAD, HEAD_DIM, HAS_SINKS, COMBINED, BLOCK_H, BLOCK_D,
    )  # fmt: skip


def tile_of(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Returns (keys in a tile, warps, stages). Of five stages, two are for block ids and three are for keys and values."""
    num_warps = 4 if head_dim <= 256 else 8  # with 4, tiles of 512 dimensions would not fit the registers
    if dtype == torch.float32:
        return (32 if head_dim <= 64 else 16), num_warps, 2
    block_n = max(16, 8192 // triton.next_power_of_2(max(64, head_dim)))
    return block_n, num_warps, 5


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Scratch memory for `max_partials` programs. Kernels that share it must run one after the other."""

    partials: Tensor
    partial_sums: Tensor
    counters: Tensor

    @staticmethod
    def num_bytes(num_multiprocessors: int, per_head: int, head_dim: int) -> int:
        """The bytes that `allocate` allocates."""
        return 4 * max_partials(num_multiprocessors) * (per_head * (head_dim + 2) + 1)

    @staticmethod
    def allocate(num_multiprocessors: int, per_head: int, head_dim: int, device: torch.device) -> "DecodeScratch":
        """Allocates memory for any number of rows and `per_head` query heads per key head. It takes 9 MB with 132
        multiprocessors, 4 query heads per key head and head_dim 128."""
        size = max_partials(num_multiprocessors)
        return DecodeScratch(
            torch.empty(size * per_head * head_dim, dtype=torch.float32, device=device),
            torch.empty(2 * size * per_head, dtype=torch.float32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
        )


def attention_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    scratch: DecodeScratch,
    *,
    splits: Splits,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    query_start_loc: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Computes the attention of the last token of each row. Its key and value are already in the cache. Returns `output`, or a
    new tensor in the shape of `query`.

    With `query_start_loc`, int32 [num_rows + 1], a row may have any number of tokens in `query`, and only the rows with one
    token are computed. The output of the others is not set.

    query [num_tokens, num_heads, head_dim], contiguous; without `query_start_loc` a token for each row. kv_cache [num_blocks,
    2, num_kv_heads, block_size, head_dim], each block contiguous, in the dtype of the query or float8_e4m3fn. block_table int32
    [num_slots, max_blocks]; slots and seq_lens int32 [num_rows]. The blocks of row i are in line `slots[i]` of `block_table`.
    sinks float32 [num_heads]. The constants are those of `AttentionParams`. `splits`: the result of `num_splits`.
    """
    num_heads, head_dim = query.shape[1:]
    num_rows = len(seq_lens)
    num_kv_heads, block_size = kv_cache.shape[2:4]
    block_n, num_warps, num_stages = tile_of(head_dim, query.dtype)
    assert query.is_contiguous() and scale > 0
    assert query_start_loc is not None or len(query) == num_rows
    assert splits.most == 1 or num_rows * num_heads * splits.most * head_dim <= len(scratch.partials)
    output = torch.empty_like(query) if output is None else output
    attention_decode_kernel[num_rows, num_kv_heads, splits.most](
        query,
        kv_cache,
        output,
        block_table,
        slots,
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        query if sinks is None else sinks,
        scratch.partials,
        scratch.partial_sums,
        scratch.counters,
        kv_cache.stride(0),
        block_table.stride(0),
        splits.usual,
        scale,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap or 0.0,
        HAS_SINKS=sinks is not None,
        HAS_STARTS=query_start_loc is not None,
        **decode_constants(num_heads // num_kv_heads, head_dim, block_size, block_n),
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=MAX_REGISTERS,
    )
    return output


def decode_constants(per_head: int, head_dim: int, block_size: int, block_n: int) -> dict[str, int]:
    """Constants of the kernel that follow from shapes."""
    block_h, block_d = triton.next_power_of_2(per_head), max(16, triton.next_power_of_2(head_dim))
    return {
        "PER_HEAD": per_head,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "MIN_TILES": -(-MIN_SPLIT_TOKENS // block_n),
        "LONG_TILES": LONG_SPLIT_TOKENS // block_n,
        "COMBINED": min(8, max(1, COMBINED_PER_THREAD * 128 // (block_h * block_d))),
        "BLOCK_H": block_h,
        "BLOCK_M": max(16, block_h),  # the smallest size that tensor cores support
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
    }
