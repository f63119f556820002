"""The common part of the paged attention kernels: a tile of queries attends to cached keys of one sequence and head.

A layer's block is [2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]: keys, then values. The queries that share a key head are rows of one
tile, so that a key is read once for all of them and the products run on tensor cores. Softmax is computed online, to the base 2
(FlashAttention, arXiv:2205.14135).

Keys that no query of the tile may see, and their entries in the block table, are not read.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_start(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The start values of `attend_keys`: weighted sum of values, largest score, sum of weights."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    return acc, largest, total


@triton.jit
def tanh(x):
    """With an absolute error of about 1e-7."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def softmax_end(acc, largest, total, sinks, heads, HAS_SINKS: tl.constexpr):
    """Returns the attention of the queries: the values weighted by the softmax. `heads` [BLOCK_M]: the query head of
    each query, which has the sink `sinks[head]` if HAS_SINKS.

    The sinks are added last, not as first keys. So sums do not depend on them, and a split is the same with and without.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + heads) * LOG2_E
        highest = tl.maximum(largest, sink)
        fade = tl.exp2(largest - highest)
        acc = acc * fade[:, None]
        total = total * fade + tl.exp2(sink - highest)
    return acc / total[:, None]


@triton.jit
def keys_end(position, seq_len, WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """The position behind the last key that a query at `position` sees."""
    end = seq_len
    if IS_CAUSAL:
        end = position + 1
    elif WINDOW > 0:
        end = tl.minimum(position + WINDOW, seq_len)
    return end


@triton.jit
def attend_keys(
    acc, largest, total, query, positions, ends, first_tile, end_tile, first_key, end_key, keys, values, block_ids,
    block_stride, scale, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continues the softmax over the keys at `[first_tile, end_tile)`, BLOCK_N keys at a time.

    query [BLOCK_M, BLOCK_D] at `positions` [BLOCK_M]. If MASKED, each query sees the keys that its position and WINDOW (0: no
    window) allow, if IS_CAUSAL those before its `ends` [BLOCK_M], and only keys in `[first_key, end_key)` are read. If not
    MASKED, every query sees all keys, and `first_tile` and `end_tile` are multiples of BLOCK_N. `keys`, `values`: pointers to
    the key head in block 0. `block_ids`: pointer to the sequence's line of the block table. `scale`: the factor of the scores,
    above 0. SOFT_CAP: 0 if scores are not capped.
    """
    d = tl.arange(0, BLOCK_D)
    to_base_2 = (SOFT_CAP if SOFT_CAP > 0 else scale) * LOG2_E
    for start in range(first_tile, end_tile, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            keep = (n >= first_key) & (n < end_key)
            ids = tl.load(block_ids + n // BLOCK_SIZE, mask=keep, other=0)
        else:
            keep = n >= 0
            ids = tl.load(block_ids + n // BLOCK_SIZE)
        # int64, because the KV cache can have more than 2 ** 31 elements
        at = (ids.to(tl.int64) * block_stride + (n % BLOCK_SIZE) * HEAD_DIM)[:, None] + d[None, :]
        # sm_89 converts float8 to bfloat16 only by way of float32; elsewhere this costs nothing
        if MASKED or BLOCK_D != HEAD_DIM:
            inside = keep[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32).to(query.dtype)
            v = tl.load(values + at, mask=inside, other=0.0).to(tl.float32).to(query.dtype)
        else:
            k = tl.load(keys + at).to(tl.float32).to(query.dtype)
            v = tl.load(values + at).to(tl.float32).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")  # exact for float32; no effect on other types
        if SOFT_CAP > 0:
            scores = tanh(scores * (scale / SOFT_CAP))
        if MASKED:
            visible = keep[None, :]
            if IS_CAUSAL:
                visible = visible & (n[None, :] < ends[:, None])
            elif WINDOW > 0:
                visible = visible & (n[None, :] < positions[:, None] + WINDOW)
            if WINDOW > 0:
                visible = visible & (n[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1) * to_base_2)
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # -inf: the query has seen no key yet
        weights = tl.exp2(scores * to_base_2 - shift[:, None])
        fade = tl.exp2(largest - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(query.dtype), v, acc, input_precision="ieee")
        largest = highest
    return acc, largest, total
