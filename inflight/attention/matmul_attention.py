"""Attention in bfloat16 from batched matrix products, for CPUs whose oneDNN has a bfloat16 product.

Torch's flash kernel on CPU multiplies bfloat16 at a fifth of what `torch.bmm` reaches. But `bmm` rounds its result to
bfloat16, and scores of 8 bits are too coarse to exponentiate. So the scores here come in float32, one of two ways:

    few queries   twice: high = round(q k), then low = round(q k - high), accumulated in float32; high + low has 16 bits
    many queries  from keys and queries converted to float32, a small cost when many queries share the keys

The weights are then rounded to bfloat16 for the product with the values, as in the flash kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_GROUP_KEYS = 768  # of all rows of a group; with fewer the flash kernel is faster: it is one call
SCORE_BYTES = 2 << 20  # float32 scores at once, so that the softmax's passes stay in the processor's cache


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def attend_group(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Few queries per key head.

    Args:
        query: `[num_rows, num_kv_heads, num_queries, head_dim]`.
        keys, values: `[num_rows, num_kv_heads, num_keys, head_dim]`, contiguous.
        mask: 0 or -inf, broadcast to the scores.

    Returns:
        As query, contiguous.
    """
    num_rows, num_kv_heads, num_queries, head_dim = query.shape
    q = query.reshape(-1, num_queries, head_dim)
    transposed = keys.view(-1, *keys.shape[2:]).transpose(1, 2)
    high = torch.bmm(q, transposed)
    low = torch.baddbmm(high, q, transposed, beta=-1)
    scores = high.float().add_(low).mul_(scale).view(num_rows, num_kv_heads, num_queries, -1).add_(mask)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    return torch.bmm(weights.view(-1, *weights.shape[2:]), values.view(-1, *values.shape[2:])).view_as(query)


def attend_piece(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, output: Tensor) -> None:
    """Many queries of one row.

    Args:
        query: `[num_kv_heads, per_head, num_queries, head_dim]`.
        keys: `[num_kv_heads, num_keys, head_dim]`, float32; values: the same in bfloat16.
        mask: `[num_queries, num_masked]`, 0 or -inf, for the last `num_masked` keys; every query sees those before them.
        output: as query; written.
    """
    num_kv_heads, per_head, num_queries, head_dim = query.shape
    num_keys = keys.shape[1]
    at_once = max(2, SCORE_BYTES // (4 * per_head * num_queries * num_keys))
    for first in range(0, num_kv_heads, at_once):
        heads = slice(first, min(first + at_once, num_kv_heads))
        q = query[heads].to(torch.float32, memory_format=torch.contiguous_format).mul_(scale)  # far fewer than scores
        q = q.view(-1, per_head * num_queries, head_dim)
        scores = torch.bmm(q, keys[heads].transpose(1, 2))
        scores.view(-1, per_head, num_queries, num_keys)[..., num_keys - mask.shape[1] :].add_(mask)
        out = torch.bmm(torch.softmax(scores, dim=-1).to(values.dtype), values[heads])
        output[heads].copy_(out.view(-1, per_head, num_queries, head_dim))
