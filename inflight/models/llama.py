"""Llama 2, 3 and 3.1+: pre-norm decoder with rotary embedding, grouped queries and a gated MLP (arXiv:2302.13971).

The other families differ from Llama only by fields of `ModelArchitecture`. The first release of Mistral (arXiv:2310.06825) has
a sliding window. Qwen2 (arXiv:2407.10671) has biases on queries, keys and values, and windows in upper layers. Qwen3
(arXiv:2505.09388) has a norm on every query and key head.
"""

from __future__ import annotations

from torch import Tensor, nn

from inflight.attention.backend import AttentionMetadata, AttentionParams, Rotation
from inflight.config.architecture import ModelArchitecture
from inflight.config.partition import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear, even_part, head_part
from inflight.layers.norm import QKNorm, RMSNorm
from inflight.layers.rotary import RotaryEmbedding
from inflight.layers.vocab import LogitsHead, VocabParallelEmbedding
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import CausalLM
from inflight.models.taped_layers import TapedLayers


class LlamaAttention(Loadable):
    """Self-attention with its projections. One multiplication computes the queries, keys and values of all heads."""

    def __init__(self, architecture: ModelArchitecture, layer: int, context: LayerContext) -> None:
        super().__init__()
        hidden_size, head_dim = architecture.hidden_size, architecture.head_dim
        query = head_part(architecture.num_heads, head_dim, context.tp)
        key_value = head_part(architecture.num_kv_heads, head_dim, context.tp)
        self.head_dim, self.ops = head_dim, context.ops
        self.num_heads, self.num_kv_heads = query.size // head_dim, key_value.size // head_dim
        self.qkv_proj = ColumnParallelLinear(
            hidden_size,
            {"q_proj": query, "k_proj": key_value, "v_proj": key_value},
            bias=architecture.qkv_bias,
            context=context,
        )
        self.o_proj = RowParallelLinear(query.total, hidden_size, bias=architecture.output_bias, context=context)
        self.qk_norm = (
            QKNorm(self.num_heads, self.num_kv_heads, head_dim, architecture.rms_norm_eps, context)
            if architecture.qk_norm
            else None
        )
        self.attn = Attention(
            f"model.layers.{layer}.self_attn",
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            params=AttentionParams(head_dim**-0.5, architecture.sliding_windows[layer]),
            backend=context.backend,
        )

    def forward(
        self, hidden: Tensor, rotation: Rotation, attn_metadata: tuple[AttentionMetadata, ...], rows: Tensor | None
    ) -> Tensor:
        num_tokens = hidden.shape[0]
        heads = self.qkv_proj(hidden).view(num_tokens, -1, self.head_dim)
        attended = self.attn(heads, rotation, self.qk_norm, attn_metadata)  # [num_tokens, num_heads, head_dim]
        attended = attended.view(num_tokens, -1)
        out: Tensor = self.o_proj(attended if rows is None else self.ops.select_rows(attended, rows))
        return out


class LlamaMLP(Loadable):
    """Computes down(silu(gate(x)) * up(x))."""

    def __init__(self, architecture: ModelArchitecture, context: LayerContext) -> None:
        super().__init__()
        hidden_size, intermediate_size = architecture.hidden_size, architecture.intermediate_size
        part = even_part(intermediate_size, context.tp)
        self.size = part.size
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size,
            {"gate_proj": part, "up_proj": part},
            bias=architecture.mlp_bias,
            context=context,
            is_gated=True,
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=architecture.mlp_bias, context=context)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(hidden))
        return out


class LlamaDecoderLayer(Loadable):
    """Attention and MLP. The input of each is the norm of the residual stream, and its output is added to the stream.

    The MLP's output is added by the first norm of the next layer, so that one kernel both adds and norms.
    """

    def __init__(self, architecture: ModelArchitecture, layer: int, context: LayerContext) -> None:
        super().__init__()
        size, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, context)
        self.self_attn = LlamaAttention(architecture, layer, context)
        self.post_attention_layernorm = RMSNorm(size, eps, context)
        self.mlp = LlamaMLP(architecture, context)

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: Rotation,
        attn_metadata: tuple[AttentionMetadata, ...],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`delta` is the output of the previous layer, not yet added to `residual`. Returns this layer's delta, and `residual`,
        changed in place.

        Keys and values are written for all tokens. With `rows`, everything after the attention is computed for these tokens
        only.
        """
        norm = self.input_layernorm
        hidden = norm(residual) if delta is None else norm.add_and_norm(delta, residual)
        hidden = self.self_attn(hidden, rotation, attn_metadata, rows)
        if rows is not None:
            residual = norm.ops.select_rows(residual, rows)
        hidden = self.post_attention_layernorm.add_and_norm(hidden, residual)
        out: Tensor = self.mlp(hidden)
        return out, residual


class LlamaForCausalLM(CausalLM):
    """The decoder with its embedding and head, or one pipeline stage of it."""

    def __init__(self, architecture: ModelArchitecture, context: LayerContext, stage: PipelineStage) -> None:
        nn.Module.__init__(self)
        vocab_size, hidden_size = architecture.vocab_size, architecture.hidden_size
        self.stage = stage
        self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden_size, context) if stage.is_first else None
        self.rotary = RotaryEmbedding(architecture.rope, architecture.head_dim, context)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(architecture, layer, context) for layer in range(stage.start, stage.stop)
        )
        self.taped = TapedLayers(self.layers, context)
        if stage.is_last:
            self.norm = RMSNorm(hidden_size, architecture.rms_norm_eps, context)
            # if the embedding is on another stage, a tied head reads the embedding's weights itself
            self.head_name = "model.embed_tokens" if architecture.tie_word_embeddings else "lm_head"
            self.lm_head = LogitsHead(
                vocab_size,
                hidden_size,
                tied_embedding=self.embed_tokens if architecture.tie_word_embeddings else None,
                context=context,
            )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: tuple[AttentionMetadata, ...],
        rows: Tensor | None = None,
        num_layers: int | None = None,
        *,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        rotation = self.rotary(positions)
        delta: Tensor | None = None
        residual: Tensor
        if self.embed_tokens is not None:
            residual = self.embed_tokens(input_ids)
        else:
            assert intermediate is not None, "only the first stage has an embedding"
            delta, residual = intermediate.delta, intermediate.residual
        rows = rows if self.stage.is_last else None

        def compute() -> tuple[Tensor, Tensor]:
            *layers, last = self.layers[:num_layers]
            result: tuple[Tensor | None, Tensor] = delta, residual
            for layer in layers:
                result = layer(*result, rotation, attn_metadata)
            last_result: tuple[Tensor, Tensor] = last(*result, rotation, attn_metadata, rows)
            return last_result

        inputs = residual, delta, rotation.cos, rotation.sin
        delta, residual = compute() if num_layers else self.taped(compute, inputs, rows, attn_metadata)
        if not self.stage.is_last:
            return IntermediateTensors(delta, residual)
        return self.norm.add_and_norm(delta, residual)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(hidden, out)
        return logits

    def load_units(self) -> list[tuple[str, Loadable]]:
        units: list[tuple[str, Loadable]] = []
        if self.embed_tokens is not None:
            units.append(("model.embed_tokens", self.embed_tokens))
        for index, layer in enumerate(self.layers, self.stage.start):
            assert isinstance(layer, LlamaDecoderLayer)
            units.append((f"model.layers.{index}", layer))
        if self.stage.is_last:
            units += [("model.norm", self.norm), (self.head_name, self.lm_head)]
        return units
