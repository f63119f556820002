"""Attention in plain torch with a soft cap of the scores, with sinks, or with a bias of positions."""

import torch
from torch import Tensor

from inflight.attention.backend import AttentionParams


def attend_with_cap_and_sinks(
    heads: Tensor, keys: Tensor, values: Tensor, visible: Tensor, distances: Tensor, params: AttentionParams
) -> Tensor:
    """Attends in float32.

    Args:
        heads: [num_kv_heads, heads per key head, num_queries, head_dim]
        keys, values: the same with the number of keys in place of num_queries.
        visible: bool [num_queries, num_keys], which keys each query sees.
        distances: int64, the same shape, how far the query is behind the key.

    Returns:
        [num_kv_heads, heads per key head, num_queries, size of a value], in the dtype of `heads`.
    """
    scores = (heads.float() @ keys.float().mT).mul_(params.scale)
    if params.soft_cap is not None:
        scores = scores.div_(params.soft_cap).tanh_().mul_(params.soft_cap)
    if params.position_bias is not None:
        radius = params.position_bias.shape[1] // 2
        bias = params.position_bias[:, (-distances).clamp_(-radius, radius) + radius]
        scores += bias.view(*heads.shape[:2], *distances.shape)
    scores = scores.masked_fill_(~visible, -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.view(*heads.shape[:2], 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return (weights @ values.float()).to(heads.dtype)
