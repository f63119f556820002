"""`LatentAttention`: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), with its projections.

The cache has one row for each token, which all heads share: a latent vector, and the rotated elements of the keys. A head's key
without rotation is a matrix times the latent vector, but it is never computed: instead, each query is multiplied by the
transposed matrix of its head, once per token. The result of attention is a weighted sum of latent vectors. Multiplied by
another matrix of the head, it becomes the sum of its values.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from inflight.attention.backend import AttentionParams, LayerStep
from inflight.config.architecture import AttentionSpec
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.norm import RMSNorm
from inflight.layers.sharding import OutputShard, head_shard, repeat_order, row_order
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class LatentAttention(Loadable):
    """Each rank has some of the query heads. All ranks compute and keep the same latent vectors."""

    def __init__(
        self, hidden_size: int, spec: AttentionSpec, layer: int, rotation_index: int, context: LayerContext
    ) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None
        self.latent, self.rotation_index, self.ops = latent, rotation_index, context.ops
        heads = head_shard(spec.num_heads, 1, context.tp)
        self.num_heads = heads.size
        order = row_order(spec.rope, latent.rope_dim)
        order = torch.arange(latent.rope_dim, dtype=torch.int64, device="cpu") if order is None else order
        inputs = {"kv_a_proj_with_mqa": _whole(spec.head_dim, _behind(latent.rank, order))}
        head_order = _behind(latent.nope_dim, order)
        query = head_shard(spec.num_heads, len(head_order), context.tp)
        query = replace(query, order=repeat_order(head_order, query.size))
        self.q_a_layernorm: RMSNorm | None = None
        if latent.query_rank is not None:
            inputs["q_a_proj"] = _whole(latent.query_rank)
            self.q_a_layernorm = RMSNorm(latent.query_rank, latent.eps, context)
        name = "q_proj" if latent.query_rank is None else "q_b_proj"
        query_size = latent.query_rank or hidden_size
        self.q_proj = ColumnParallelLinear(query_size, {name: query}, bias=False, context=context)
        self.in_proj = ColumnParallelLinear(hidden_size, inputs, bias=spec.qkv_bias, context=context)
        self.kv_a_layernorm = RMSNorm(latent.rank, latent.eps, context)
        self.kv_b = head_shard(spec.num_heads, latent.nope_dim + latent.value_dim, context.tp)
        rows = torch.empty(self.kv_b.size, latent.rank, dtype=context.dtype, device=context.weight_device)
        self.kv_b_weight = nn.Parameter(rows, False)
        self.linear = context.linear
        self.o_proj = RowParallelLinear(
            spec.num_heads * latent.value_dim, hidden_size, bias=spec.output_bias, context=context
        )
        assert spec.scale is not None, "it does not follow from the size of the cached rows"
        self.attn = Attention(
            f"model.layers.{layer}.self_attn",
            num_heads=heads.size,
            num_kv_heads=1,
            head_dim=spec.head_dim,
            params=AttentionParams(spec.scale, value_dim=latent.rank, sliding_window=spec.window),
            backend=context.backend,
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        weight = self.kv_b_weight.data
        slot = WeightSlot(shape=(self.kv_b.total, weight.shape[1]), destination=weight, start=self.kv_b.start)
        yield f"{prefix}.kv_b_proj.weight", slot

    def finish_loading(self) -> None:
        super().finish_loading()
        heads = self.kv_b_weight.data.view(self.num_heads, -1, self.latent.rank)
        of_keys, of_values = heads[:, : self.latent.nope_dim], heads[:, self.latent.nope_dim :]
        self.absorb_keys = self.linear.prepare_heads(of_keys.mT.contiguous())
        self.expand_values = self.linear.prepare_heads(of_values.contiguous())
        del self.kv_b_weight

    def forward(self, hidden: Tensor, step: LayerStep, rows: Tensor | None) -> Tensor:
        """hidden [num_tokens, hidden_size] -> [num_tokens, hidden_size]; with `rows`, only these tokens are in the result."""
        latent, rotation, num_heads = self.latent, step.rotations[self.rotation_index], self.num_heads
        projected = self.in_proj(hidden)
        row_size = latent.rank + latent.rope_dim
        if self.q_a_layernorm is not None:
            hidden = self.q_a_layernorm(projected[:, row_size:])
        queries = self.q_proj(hidden).view(-1, num_heads, latent.nope_dim + latent.rope_dim)
        query = queries.new_empty((len(hidden), num_heads, row_size))
        self.absorb_keys(queries[:, :, : latent.nope_dim], query[:, :, : latent.rank])
        self.ops.copy_heads(rotation.apply(queries[:, :, latent.nope_dim :], None), query[:, :, latent.rank :])
        cached = projected[:, :row_size].unsqueeze(1)
        self.ops.norm_heads(cached[:, :, : latent.rank], self.kv_a_layernorm.weight.unsqueeze(0), latent.eps)
        key_rope = cached[:, :, latent.rank :]
        self.ops.copy_heads(rotation.apply(key_rope, None), key_rope)
        attended = self.attn.forward_latent(query, cached, step.attn_metadata).flatten(1)
        if rows is not None:
            attended = self.ops.select_rows(attended, rows)
        values = attended.new_empty((len(attended), num_heads * latent.value_dim))
        self.expand_values(attended.view(-1, num_heads, latent.rank), values.view(-1, num_heads, latent.value_dim))
        out: Tensor = self.o_proj(values)
        return out


def _whole(size: int, order: Tensor | None = None) -> OutputShard:
    """A projection of which every rank holds all rows."""
    return OutputShard(size, 0, size, order=order)


def _behind(num_rows: int, order: Tensor) -> Tensor:
    """An order of rows: the first `num_rows` as they are, then the others in the order `order`."""
    return torch.cat((torch.arange(num_rows, dtype=torch.int64, device="cpu"), num_rows + order))
