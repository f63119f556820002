"""Plain formulas that kernels are tested against. They compute in the dtype of their arguments (float64 in tests).

Nothing here is fast, and only tests call it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inflight.config.architecture import GELU, SILU, SWIGLU_OAI

TOKENS_AT_ONCE = 64  # query tokens that attention computes together; more would use more memory, fewer would be slower


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = True,
    ends: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Computes attention for the last tokens of each row (sequence) over the row's blocks. The blocks already hold all
    keys and values of the row, also those of the last tokens.

    Args:
        query: `[num_tokens, num_heads, head_dim]`. Row i has the tokens `[query_start_loc[i], query_start_loc[i + 1])`, which
            are the last of its `seq_lens[i]` tokens.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_table: `[num_rows, max_blocks]`; position p of row i is in block `block_table[i, p // block_size]`.
        sliding_window: a query at p sees the keys at `[max(0, p - sliding_window + 1), p]`. If it is None, the query sees the
            keys at `[0, p]`.
        soft_cap: c, for scores `c * tanh(scale * (query . key) / c)`.
        sinks: `[num_heads]`, for each head one more logit in the denominator of the softmax.
        is_causal: if it is not set, the query also sees the keys behind it, up to `seq_lens[i] - 1`; with a window, those below
            `p + sliding_window`.
        ends: `[num_tokens]`, if given: each query sees the keys before this position, whatever `is_causal` is; with a window,
            those above `p - sliding_window`.
        position_bias: `[num_heads, 2 * radius + 1]`: what is added to the score of a key that is d behind its query, at
            `radius + d`; distances beyond the radius count as the radius.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    per_head = query.shape[1] // num_kv_heads
    output = torch.empty_like(query)
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[row : row + 2].tolist()
        seen = torch.arange(
            0 if sliding_window is None else max(0, seq_len - (end - start) - sliding_window + 1), seq_len
        )
        block_ids = block_table[row, seen // block_size]
        keys, values = (cache[block_ids, seen % block_size] for cache in (key_cache, value_cache))
        # A masked value has the weight 0, but 0 times NaN or infinity is NaN. So if a value is not finite, each token is
        # computed alone, with only the values that it sees.
        at_once = TOKENS_AT_ONCE if values.isfinite().all() else 1
        for first in range(start, end, at_once):
            tokens = slice(first, min(first + at_once, end))
            position = seq_len - end + torch.arange(tokens.start, tokens.stop)[:, None]
            visible = seen <= position if is_causal else (seen >= 0).expand(len(position), -1)  # [tokens, keys]
            if sliding_window is not None:
                visible = visible & (seen > position - sliding_window) & (seen < position + sliding_window)
            if ends is not None:
                visible = (seen < ends[tokens, None]) & (seen > position - (sliding_window or seq_len))
            used = visible.any(dim=0)
            heads = query[tokens].view(-1, num_kv_heads, per_head, query.shape[2])
            scores = torch.einsum("qhgd,khd->hgqk", heads, keys[used]) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if position_bias is not None:
                radius = position_bias.shape[1] // 2
                bias = position_bias.to(scores.dtype)[:, (seen[used] - position).clamp(-radius, radius) + radius]
                scores = scores + bias.view(num_kv_heads, per_head, *bias.shape[1:])
            scores = scores.masked_fill(~visible[:, used], -torch.inf)
            if sinks is not None:
                sinks = sinks.to(scores.dtype).view(num_kv_heads, per_head, 1, 1)
                scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : int(used.sum())]
            output[tokens] = torch.einsum("hgqk,khd->qhgd", weights, values[used]).flatten(1, 2)
    return output


def quantised(x: Tensor) -> Tensor:
    """Rounds x to int8 with one scale per row (the last dimension), and converts it back. In int8 the largest element is 127.

    An element changes by at most 1/254 of the largest element of its row. A row with an infinity or a NaN becomes NaN.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    # This rounds once. `127 / largest` would round twice: torch computes it as 127 * (1 / largest).
    inverse = torch.full_like(largest, 127) / largest
    integers = torch.round(x * torch.where(largest > 0, inverse, 0))  # ties to even
    return integers * (largest / 127)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019).

    `residual` is added to x first. Returns the normed values, and x with the residual added, which is the next residual.
    """
    x = x if residual is None else x + residual
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight, x


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al., 2021). It pairs the two halves of a head, as Hugging Face's Llama does.

    x: `[num_tokens, num_heads, head_dim]`. The pair (j, j + head_dim / 2) is rotated by the angle
    `position * theta ** (-2j / head_dim)`.
    """
    half = x.shape[-1] // 2
    frequencies = torch.tensor([theta ** (-j / half) for j in range(half)], dtype=x.dtype)
    angles = (positions.to(x.dtype)[:, None] * frequencies)[:, None, :]  # [num_tokens, 1, half]
    a, b = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def multiply_gate(x: Tensor, activation: str) -> Tensor:
    """Returns activation(gate) * up. The first half of x's last dimension is gate, the second half is up. `activation` is SILU,
    g * sigmoid(g), or GELU_TANH, g / 2 * (1 + tanh(z)), which is g * sigmoid(2z), with z = sqrt(2 / pi) * (g + 0.044715 g^3).
    GELU is g / 2 * (1 + erf(g / sqrt(2))); 1 + erf(y) is erfc(-y), which keeps the digits of a small sum.
    With SWIGLU_OAI, the result is g * sigmoid(1.702 g) * (up + 1), with gates of at most 7, and ups from -7 to 7.
    """
    gate, up = x.chunk(2, dim=-1)
    if activation == SWIGLU_OAI:
        gate = gate.clamp(max=7.0)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up.clamp(-7.0, 7.0) + 1)
    if activation == GELU:
        tail: Tensor = torch.special.erfc(-gate / math.sqrt(2))
        return gate / 2 * tail * up
    z = gate if activation == SILU else math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + torch.exp(-z)) * up
