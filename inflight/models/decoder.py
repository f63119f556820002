"""`DecoderForCausalLM`: the decoder that a `ModelArchitecture` describes, of whatever family.

Each layer reads its own entry of `ModelArchitecture.layers`: numbers of heads, widths, window, rotary embedding, biases, norms.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from inflight.attention.backend import AttentionParams, LayerStep
from inflight.config.architecture import HEAD, SIGMOID, WHOLE, AttentionSpec, GatedDeltaSpec, MlpSpec, ModelArchitecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.gated_delta import GatedDeltaMixer
from inflight.layers.latent_attention import LatentAttention
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.norm import RMSNorm
from inflight.layers.qk_norm import QKNorm, WholeQKNorm
from inflight.layers.recurrent_mixer import RecurrentMixer
from inflight.layers.rotary import RotaryEmbedding
from inflight.layers.sharding import OutputShard, even_shard, fused, head_shard, repeat_order, row_order
from inflight.layers.short_conv import ShortConvMixer
from inflight.layers.token_inputs import TokenInput, TokenInputs
from inflight.layers.vocab import LogitsHead, VocabParallelEmbedding
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.models.taped_layers import TapedLayers


class DecoderAttention(Loadable):
    """Self-attention with its projections. One multiplication computes the queries, keys and values of all heads."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        spec: AttentionSpec,
        layer: int,
        rotation_index: int,
        context: LayerContext,
        owner: Attention | None,
    ) -> None:
        super().__init__()
        hidden_size = architecture.hidden_size
        value = head_shard(spec.num_kv_heads, spec.head_dim, context.tp)
        query, key = head_shard(spec.num_heads, spec.head_dim, context.tp), value
        self.head_dim, self.rotation_index, self.ops = spec.head_dim, rotation_index, context.ops
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
        if spec.qk_norm == HEAD:
            heads = self.num_heads, self.num_new
            self.qk_norm = QKNorm(*heads, spec.head_dim, eps, context, order=order, offset=offset)
        elif spec.qk_norm == WHOLE:
            assert not offset, "no family has such norms"
            self.whole_qk_norm = WholeQKNorm(query, key, eps, context)
        self.value_norm: nn.Parameter | None = None
        if spec.has_value_norm and owner is None:
            ones = torch.ones(self.num_new, spec.head_dim, dtype=context.dtype, device=context.device)
            self.value_norm = nn.Parameter(ones, False)
        self.eps = eps
        self.attn = Attention(
            f"model.layers.{layer}.self_attn",
            num_heads=self.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=spec.head_dim,
            params=AttentionParams(
                spec.head_dim**-0.5 if spec.scale is None else spec.scale, spec.window, spec.soft_cap
            ),
            backend=context.backend,
            owner=owner,
        )

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
        attended = self.attn(heads, rotation, self.qk_norm, step.attn_metadata)
        attended = attended.view(num_tokens, -1)  # was [num_tokens, num_heads, head_dim]
        if self.has_gate:
            self.ops.multiply_activation(attended, projected[:, -attended.shape[1] :], SIGMOID)
        out: Tensor = self.o_proj(attended if rows is None else self.ops.select_rows(attended, rows))
        return out


def _with_gate(query: OutputShard, head_dim: int) -> dict[str, OutputShard]:
    """The projections to queries and to their gates, if the checkpoint has the gates of each head behind its queries."""
    order = torch.arange(query.size, dtype=torch.int64, device="cpu") if query.order is None else query.order
    rows = order + order // head_dim * head_dim  # a head has twice as many rows
    gates = torch.arange(query.size, dtype=torch.int64, device="cpu")
    gates = gates + (gates // head_dim + 1) * head_dim
    both = replace(query, total=2 * query.total, start=2 * query.start, source="q_proj")
    return {"q_proj": replace(both, order=rows), "gate": replace(both, order=gates)}


class GatedMLP(Loadable):
    """Computes down(activation(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, spec: MlpSpec, context: LayerContext) -> None:
        super().__init__()
        part = even_shard(spec.size, context.tp)
        self.size = part.size
        parts = {"gate_proj": part, "up_proj": part}
        if spec.is_fused:
            parts = fused("gate_up_proj", parts)
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size, parts, bias=spec.bias, context=context, gate=spec.activation
        )
        self.down_proj = RowParallelLinear(spec.size, hidden_size, bias=spec.bias, context=context)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(hidden))
        return out


def _norm(architecture: ModelArchitecture, context: LayerContext, *, reads_stream: bool = False) -> RMSNorm:
    """`reads_stream`: its input is the residual stream, and not what a layer adds to it."""
    eps = architecture.stream_eps if reads_stream and architecture.stream_eps is not None else architecture.rms_norm_eps
    return RMSNorm(architecture.hidden_size, eps, context, offset=architecture.norm_offset)


class DecoderLayer(Loadable):
    """Attention and MLP. The input of each is the residual stream, and its output is added to the stream. `LayerSpec.norms`
    says which inputs and outputs have a norm.

    The MLP's output is added by the next layer. If the next layer begins with a norm, one kernel both adds and norms.

    `owner`: the layer whose keys and values the attention reads, if it has none of its own.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        layer: int,
        rotation_index: int,
        context: LayerContext,
        owner: Attention | None,
    ) -> None:
        super().__init__()
        spec = architecture.layers[layer]
        names, sizes = spec.norms, (architecture.hidden_size, architecture.rms_norm_eps)
        self.before_attention = _norm(architecture, context, reads_stream=True) if names.before_attention else None
        self.self_attn: DecoderAttention | LatentAttention | RecurrentMixer
        if spec.attention is not None and spec.attention.latent is not None:
            self.self_attn = LatentAttention(sizes[0], spec.attention, layer, rotation_index, context)
        elif spec.attention is not None:
            self.self_attn = DecoderAttention(architecture, spec.attention, layer, rotation_index, context, owner)
        elif isinstance(spec.recurrence, GatedDeltaSpec):
            self.self_attn = GatedDeltaMixer(*sizes, spec.recurrence, layer, context)
        else:
            assert spec.recurrence is not None
            self.self_attn = ShortConvMixer(architecture.hidden_size, spec.recurrence, layer, context)
        self.after_attention = _norm(architecture, context) if names.after_attention else None
        self.before_mlp = _norm(architecture, context, reads_stream=True) if names.before_mlp else None
        self.mlp = GatedMLP(architecture.hidden_size, spec.mlp, context)
        self.after_mlp = _norm(architecture, context) if names.after_mlp else None
        inputs = architecture.token_inputs
        self.token_input = None if inputs is None else TokenInput(*sizes, inputs, context)
        ones = torch.ones(1, dtype=torch.float32, device=context.device)
        self.scalar = nn.Parameter(ones, False) if spec.has_scalar else None
        self.norm_names, self.ops, self.layer = names, context.ops, layer

    def weight_slots(self, prefix: str) -> WeightSlots:
        names = asdict(self.norm_names)
        if isinstance(self.self_attn, RecurrentMixer):
            names["self_attn"] = self.self_attn.name
        for name, child in self.named_children():
            if isinstance(child, Loadable):
                yield from child.weight_slots(f"{prefix}.{names.get(name, name)}")
        if self.scalar is not None:
            yield f"{prefix}.layer_scalar", WeightSlot(shape=(1,), destination=self.scalar.data, is_scale=True)

    def forward(
        self, delta: Tensor | None, residual: Tensor, step: LayerStep, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`delta` is the output of the previous layer, not yet added to `residual`. Returns this layer's delta, and `residual`,
        changed in place. The layer may change its own vectors of `step.token_inputs`.

        Keys and values are written for all tokens. With `rows`, everything after the attention is computed for these tokens
        only.
        """
        hidden = self.self_attn(self._add(delta, residual, self.before_attention), step, rows)
        if self.after_attention is not None:
            hidden = self.after_attention(hidden)
        if rows is not None:
            residual = self.ops.select_rows(residual, rows)
        hidden = self.mlp(self._add(hidden, residual, self.before_mlp))
        if self.after_mlp is not None:
            hidden = self.after_mlp(hidden)
        if self.token_input is not None:
            assert step.token_inputs is not None, "the model has made none"
            vectors = step.token_inputs[:, self.layer]
            self.ops.add_and_scale(residual, hidden, None)
            hidden = self.token_input(residual, vectors if rows is None else self.ops.select_rows(vectors, rows))
        if self.scalar is not None:
            for part in (residual, hidden):
                self.ops.add_and_scale(part, None, self.scalar)
        return hidden, residual

    def _add(self, delta: Tensor | None, residual: Tensor, norm: RMSNorm | None) -> Tensor:
        """Adds `delta` (None: nothing) to `residual` in place. Returns the norm of the sum (None: the sum itself)."""
        if norm is None:
            if delta is not None:
                self.ops.add_and_scale(residual, delta, None)
            return residual
        normed: Tensor = norm(residual) if delta is None else norm.add_and_norm(delta, residual)
        return normed


class DecoderForCausalLM(CausalLM):
    """The decoder with its embedding and head, or one pipeline stage of it."""

    def __init__(self, architecture: ModelArchitecture, context: LayerContext, stage: PipelineStage) -> None:
        nn.Module.__init__(self)
        vocab_size, hidden_size = architecture.vocab_size, architecture.hidden_size
        self.stage, self.unread = stage, architecture.unread
        self.embedding_scale = architecture.embedding_scale
        if architecture.rounds_embedding_scale:
            self.embedding_scale = float(torch.tensor(self.embedding_scale, dtype=context.dtype, device="cpu"))
        self.logits_scale, self.logits_cap = architecture.logits_scale, architecture.logits_cap
        self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden_size, context) if stage.is_first else None
        # one rotation per step for each kind of rotary embedding among the layers
        attentions = [layer.attention for layer in architecture.layers[stage.start : stage.stop]]
        kinds = [(each.rope, each.rotated_dim) if each is not None else None for each in attentions]
        index_of = {kind: index for index, kind in enumerate(dict.fromkeys(filter(None, kinds)))}
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope, head_dim, context) for rope, head_dim in index_of)
        layers: list[DecoderLayer] = []
        for layer, (spec, kind) in enumerate(zip(attentions, kinds, strict=True), stage.start):
            owner: Attention | None = None
            if spec is not None and spec.kv_layer is not None:
                mixer = layers[spec.kv_layer - stage.start].self_attn
                assert isinstance(mixer, DecoderAttention), "it has no keys and values"
                owner = mixer.attn
            rotation_index = 0 if kind is None else index_of[kind]
            layers.append(DecoderLayer(architecture, layer, rotation_index, context, owner))
        self.layers = nn.ModuleList(layers)
        sizes = hidden_size, architecture.rms_norm_eps
        self.token_inputs: TokenInputs | None = None
        if architecture.token_inputs is not None:
            assert stage.is_first and stage.is_last, "the sizes were checked at start"
            self.token_inputs = TokenInputs(len(self.layers), *sizes, architecture.token_inputs, context)
        self.taped = TapedLayers(self.layers, context)
        if stage.is_last:
            self.norm = _norm(architecture, context, reads_stream=True)
            # if the embedding is on another stage, a tied head reads the embedding's weights itself
            self.head_name = "model.embed_tokens" if architecture.tie_word_embeddings else "lm_head"
            self.lm_head = LogitsHead(
                vocab_size,
                hidden_size,
                tied_embedding=self.embed_tokens if architecture.tie_word_embeddings else None,
                context=context,
            )

    def forward(self, step: ModelStep) -> Tensor | IntermediateTensors:
        rotations = tuple(rotary(step.positions) for rotary in self.rotaries)
        delta: Tensor | None = None
        residual: Tensor
        if self.embed_tokens is not None:
            residual = self.embed_tokens(step.input_ids)
            if self.embedding_scale != 1.0:
                residual.mul_(self.embedding_scale)
        else:
            assert step.intermediate is not None, "only the first stage has an embedding"
            delta, residual = step.intermediate.delta, step.intermediate.residual
        rows = step.rows if self.stage.is_last else None
        token_inputs = None if self.token_inputs is None else self.token_inputs(step.input_ids, residual)
        shared = LayerStep(rotations, step.attn_metadata, token_inputs)

        def compute() -> tuple[Tensor, Tensor]:
            *others, last = self.layers if step.layers is None else [self.layers[index] for index in step.layers]
            result: tuple[Tensor | None, Tensor] = delta, residual
            for layer in others:
                result = layer(*result, shared)
            last_result: tuple[Tensor, Tensor] = last(*result, shared, rows)
            return last_result

        inputs = (residual, delta, token_inputs, *(tensor for rotation in rotations for tensor in rotation.tensors))
        delta, residual = (
            compute() if step.layers is not None else self.taped(compute, inputs, rows, step.attn_metadata)
        )
        return self.norm.add_and_norm(delta, residual) if self.stage.is_last else IntermediateTensors(delta, residual)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(hidden, out)
        if self.logits_scale != 1.0:
            logits.mul_(self.logits_scale)
        if self.logits_cap is not None:
            logits.div_(self.logits_cap).tanh_().mul_(self.logits_cap)
        return logits

    def leaves_unread(self, name: str) -> bool:
        return name.startswith(self.unread) or f"model.{name}".startswith(self.unread)

    def load_units(self) -> list[tuple[str, Loadable]]:
        units: list[tuple[str, Loadable]] = []
        if self.embed_tokens is not None:
            units.append(("model.embed_tokens", self.embed_tokens))
        if self.token_inputs is not None:
            units.append(("model.token_inputs", self.token_inputs))
        for index, layer in enumerate(self.layers, self.stage.start):
            assert isinstance(layer, DecoderLayer)
            units.append((f"model.layers.{index}", layer))
        if self.stage.is_last:
            units += [("model.norm", self.norm), (self.head_name, self.lm_head)]
        return units
