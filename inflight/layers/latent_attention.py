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
from inflight.config.mixers import LatentAttentionSpec
from inflight.layers.attention import Attention
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mixer import Mixer, MixerPlace
from inflight.layers.norm import RMSNorm
from inflight.layers.sharding import OutputShard, head_shard, repeat_order, row_order
from inflight.layers.weights import WeightSlot, WeightSlots


class LatentAttention(Mixer):
    """Each rank has some of the query heads. All ranks compute and keep the same latent vectors."""

    def __init__(self, spec: LatentAttentionSpec, place: MixerPlace) -> None:
        super().__init__()
        context = place.context
        hidden_size = place.architecture.hidden_size
        self.spec = spec
        self.rotation_index = place.rotation_index
        self.ops = context.ops
        heads = head_shard(spec.num_heads, 1, context.tp)
        self.num_heads = heads.size
        order = row_order(spec.rope, spec.rope_dim)
        order = torch.arange(spec.rope_dim, dtype=torch.int64, device="cpu") if order is None else order
        inputs = {"kv_a_proj_with_mqa": _whole(spec.head_dim, _behind(spec.rank, order))}
        head_order = _behind(spec.nope_dim, order)
        query = head_shard(spec.num_heads, len(head_order), context.tp)
        query = replace(query, order=repeat_order(head_order, query.size))
        self.q_a_layernorm: RMSNorm | None = None
        if spec.query_rank is not None:
            inputs["q_a_proj"] = _whole(spec.query_rank)
            self.q_a_layernorm = RMSNorm(spec.query_rank, spec.eps, context)
        name = "q_proj" if spec.query_rank is None else "q_b_proj"
        query_size = spec.query_rank or hidden_size
        self.q_proj = ColumnParallelLinear(query_size, {name: query}, bias=False, context=context)
        self.in_proj = ColumnParallelLinear(hidden_size, inputs, bias=spec.qkv_bias, context=context)
        self.kv_a_layernorm = RMSNorm(spec.rank, spec.eps, context)
        self.kv_b = head_shard(spec.num_heads, spec.nope_dim + spec.value_dim, context.tp)
        rows = torch.empty(self.kv_b.size, spec.rank, dtype=context.dtype, device=context.weight_device)
        self.kv_b_weight = nn.Parameter(rows, False)
        self.linear = context.linear
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.value_dim, hidden_size, bias=spec.output_bias, context=context
        )
        assert spec.scale is not None, "it does not follow from the size of the cached rows"
        self.attn = Attention(
            f"model.layers.{place.layer}.self_attn",
            num_heads=heads.size,
            num_kv_heads=1,
            head_dim=spec.head_dim,
            params=AttentionParams(spec.scale, value_dim=spec.rank, sliding_window=spec.window),
            backend=context.backend,
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        weight = self.kv_b_weight.data
        slot = WeightSlot(shape=(self.kv_b.total, weight.shape[1]), destination=weight, start=self.kv_b.start)
        yield f"{prefix}.kv_b_proj.weight", slot

    def finish_loading(self) -> None:
        super().finish_loading()
        heads = self.kv_b_weight.data.view(self.num_heads, -1, self.spec.rank)
        of_keys = heads[:, : self.spec.nope_dim]
        of_values = heads[:, self.spec.nope_dim :]
        self.absorb_keys = self.linear.prepare_heads(of_keys.mT.contiguous())
        self.expand_values = self.linear.prepare_heads(of_values.contiguous())
        del self.kv_b_weight

    def forward(self, hidden: Tensor, step: LayerStep, rows: Tensor | None) -> Tensor:
        spec = self.spec
        rotation = step.rotations[self.rotation_index]
        num_heads = self.num_heads
        projected = self.in_proj(hidden)
        row_size = spec.rank + spec.rope_dim
        if self.q_a_layernorm is not None:
            hidden = self.q_a_layernorm(projected[:, row_size:])
        queries = self.q_proj(hidden).view(-1, num_heads, spec.nope_dim + spec.rope_dim)
        query = queries.new_empty((len(hidden), num_heads, row_size))
        self.absorb_keys(queries[:, :, : spec.nope_dim], query[:, :, : spec.rank])
        rotated = rotation.apply(queries[:, :, spec.nope_dim :], None)
        self.ops.copy_heads(rotated, query[:, :, spec.rank :])
        cached = projected[:, :row_size].unsqueeze(1)
        self.ops.norm_heads(cached[:, :, : spec.rank], self.kv_a_layernorm.weight.unsqueeze(0), spec.eps)
        key_rope = cached[:, :, spec.rank :]
        self.ops.copy_heads(rotation.apply(key_rope, None), key_rope)
        attended = self.attn.forward_rotated(query, cached, cached[:, :0], step.attn_metadata).flatten(1)
        if rows is not None:
            attended = self.ops.select_rows(attended, rows)
        values = attended.new_empty((len(attended), num_heads * spec.value_dim))
        self.expand_values(attended.view(-1, num_heads, spec.rank), values.view(-1, num_heads, spec.value_dim))
        out: Tensor = self.o_proj(values)
        return out


def _whole(size: int, order: Tensor | None = None) -> OutputShard:
    """A projection of which every rank holds all rows."""
    return OutputShard(size, 0, size, order=order)


def _behind(num_rows: int, order: Tensor) -> Tensor:
    """An order of rows: the first `num_rows` as they are, then the others in the order `order`."""
    return torch.cat((torch.arange(num_rows, dtype=torch.int64, device="cpu"), num_rows + order))
