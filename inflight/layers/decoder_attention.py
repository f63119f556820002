"""`DecoderAttention`: the attention of most families, with its projections, norms and gates."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from inflight.attention.backend import AttentionParams, LayerStep, Rotation
from inflight.config.architecture import SIGMOID
from inflight.config.mixers import HEAD, ROTATED_HEAD, WHOLE, AttentionSpec
from inflight.layers.attention import Attention
from inflight.layers.attention_sinks import AttentionSinks
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mixer import Mixer, MixerPlace
from inflight.layers.position_bias import add_bias
from inflight.layers.qk_norm import QKNorm, WholeQKNorm
from inflight.layers.sharding import OutputShard, fused, head_shard, repeat_order, row_order


class DecoderAttention(Mixer):
    """Self-attention with its projections. One multiplication computes the queries, keys and values of all heads."""

    def __init__(self, spec: AttentionSpec, place: MixerPlace) -> None:
        super().__init__()
        architecture, context, owner = place.architecture, place.context, place.owner
        hidden_size = architecture.hidden_size
        value = head_shard(spec.num_kv_heads, spec.head_dim, context.tp)
        query, key = head_shard(spec.num_heads, spec.head_dim, context.tp), value
        self.head_dim, self.rotation_index, self.ops = spec.head_dim, place.rotation_index, context.ops
        self.num_heads, num_kv_heads = query.size // spec.head_dim, value.size // spec.head_dim
        self.num_new = num_kv_heads if owner is None else 0  # key heads that the layer computes
        order = row_order(spec.rope, spec.head_dim)
        if order is not None:
            query, key = (replace(part, order=repeat_order(order, part.size)) for part in (query, key))
        parts = {"q_proj": query}
        if owner is None:
            value = replace(value, source="k_proj" if spec.values_are_keys else None)
            parts |= {"k_proj": key, "v_proj": value}
        if spec.is_fused:
            parts = fused("qkv_proj", parts)
        if spec.has_gate:
            parts = {**parts, **_with_gate(query, spec.head_dim)}
        self.has_gate = spec.has_gate
        self.qkv_proj = ColumnParallelLinear(hidden_size, parts, bias=spec.qkv_bias, context=context)
        self.o_proj = RowParallelLinear(query.total, hidden_size, bias=spec.output_bias, context=context)
        eps, offset = architecture.rms_norm_eps, architecture.norm_offset
        self.qk_norm: QKNorm | None = None
        self.whole_qk_norm: WholeQKNorm | None = None
        self.norms_rotated = spec.qk_norm == ROTATED_HEAD
        if spec.qk_norm in (HEAD, ROTATED_HEAD):
            heads = self.num_heads, self.num_new
            self.qk_norm = QKNorm(*heads, spec.head_dim, eps, context, order=order, offset=offset)
        elif spec.qk_norm == WHOLE:
            assert not offset, "no family has such norms"
            self.whole_qk_norm = WholeQKNorm(query, key, eps, context)
        self.value_norm: nn.Parameter | None = None
        if spec.has_value_norm and owner is None:
            ones = torch.ones(self.num_new, spec.head_dim, dtype=context.dtype, device=context.device)
            self.value_norm = nn.Parameter(ones, False)
        self.sinks = AttentionSinks(spec.num_heads, context) if spec.has_sinks else None
        self.eps = eps
        self.attn = Attention(
            f"model.layers.{place.layer}.self_attn",
            num_heads=self.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=spec.head_dim,
            params=AttentionParams(
                spec.head_dim**-0.5 if spec.scale is None else spec.scale,
                spec.window,
                spec.soft_cap,
                None if self.sinks is None else self.sinks.logits.data,
                is_causal=spec.is_causal,
                sees_whole_images=spec.sees_whole_images,
            ),
            backend=context.backend,
            owner=owner,
        )
        self.position_bias = None if spec.position_bias is None else add_bias(self.attn, spec, context)

    def forward(self, hidden: Tensor, step: LayerStep, rows: Tensor | None) -> Tensor:
        num_tokens = hidden.shape[0]
        projected = self.qkv_proj(hidden)
        if self.whole_qk_norm is not None:
            self.whole_qk_norm(projected)
        heads = projected.view(num_tokens, -1, self.head_dim)
        if self.has_gate:
            heads = heads[:, : -self.num_heads]
        if self.value_norm is not None:
            self.ops.norm_heads(heads[:, -self.num_new :], self.value_norm, self.eps)
        rotation = step.rotations[self.rotation_index]
        if rotation.query_scale is not None:
            self.ops.add_and_scale(projected[:, : self.num_heads * self.head_dim], None, rotation.query_scale)
        if self.norms_rotated:
            attended = self._attend_normed(heads, rotation, step)
        else:
            attended = self.attn(heads, rotation, self.qk_norm, step.attn_metadata)
        attended = attended.view(num_tokens, -1)  # was [num_tokens, num_heads, head_dim]
        if self.has_gate:
            self.ops.multiply_activation(attended, projected[:, -attended.shape[1] :], SIGMOID)
        out: Tensor = self.o_proj(attended if rows is None else self.ops.select_rows(attended, rows))
        return out

    def _attend_normed(self, heads: Tensor, rotation: Rotation, step: LayerStep) -> Tensor:
        """Norms queries and keys after their rotation. As `Attention.forward`."""
        assert self.qk_norm is not None
        num_rotated = self.num_heads + self.num_new
        rotated = rotation.apply(heads[:, :num_rotated], None)
        self.ops.norm_heads(rotated, self.qk_norm.weight, self.eps)
        parts = rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]
        return self.attn.forward_rotated(*parts, step.attn_metadata)


def _with_gate(query: OutputShard, head_dim: int) -> dict[str, OutputShard]:
    """The projections to queries and to their gates, if the checkpoint has the gates of each head behind its queries."""
    order = torch.arange(query.size, dtype=torch.int64, device="cpu") if query.order is None else query.order
    rows = order + order // head_dim * head_dim  # a head has twice as many rows
    gates = torch.arange(query.size, dtype=torch.int64, device="cpu")
    gates = gates + (gates // head_dim + 1) * head_dim
    both = replace(query, total=2 * query.total, start=2 * query.start, source="q_proj")
    return {"q_proj": replace(both, order=rows), "gate": replace(both, order=gates)}
