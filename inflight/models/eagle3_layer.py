"""`Eagle3Drafter`: a layer that reads several hidden states of the served model for each token.

Source: EAGLE-3 (arXiv:2503.01840), section 3.
"""

from dataclasses import replace

import torch
from torch import Tensor

from inflight.attention.backend import LayerStep
from inflight.config.architecture import ModelArchitecture
from inflight.config.mixers import AttentionSpec
from inflight.layers.context import LayerContext
from inflight.layers.decoder_attention import DecoderAttention
from inflight.layers.linear import RowParallelLinear
from inflight.layers.mixer import MixerPlace
from inflight.models.causal_lm import ModelStep
from inflight.models.decoder import DecoderForCausalLM
from inflight.models.decoder_layer import DecoderLayer
from inflight.models.drafting_layer import DraftingLayer


class JoinedAttention(DecoderAttention):
    """Attention whose input is twice as wide as its output."""

    def __init__(self, spec: AttentionSpec, place: MixerPlace) -> None:
        size = place.architecture.hidden_size
        wider = replace(place.architecture, hidden_size=2 * size)
        super().__init__(spec, replace(place, architecture=wider))
        total = self.o_proj.columns.total
        self.o_proj = RowParallelLinear(total, size, bias=spec.output_bias, context=place.context)


class Eagle3Layer(DecoderLayer):
    def __init__(self, place: MixerPlace) -> None:
        super().__init__(place)
        spec = place.architecture.layers[place.layer].mixer
        assert isinstance(spec, AttentionSpec)
        self.self_attn = JoinedAttention(spec, place)

    def read(self, joined: Tensor, residual: Tensor, step: LayerStep, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `forward`, with the input of the attention, [num_tokens, 2 * hidden_size], which the norms have made."""
        hidden = self.self_attn(joined, step, rows)
        if rows is not None:
            residual = self.ops.select_rows(residual, rows)
        hidden = self._add(hidden, residual, self.before_mlp)
        return self.mlp(hidden), residual


class Eagle3Drafter(DraftingLayer):
    """Its result is the hidden states before the final norm. `compute_logits` norms them."""

    layer_type = Eagle3Layer

    def __init__(
        self, architecture: ModelArchitecture, context: LayerContext, served: DecoderForCausalLM | None
    ) -> None:
        super().__init__(architecture, context, served)
        self.hidden_norm = None  # that of the layer is used

    def forward(self, step: ModelStep) -> Tensor:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer) and layer.before_attention is not None and self.embedding_norm is not None
        embedded = self._embedded(step)
        hidden = torch.zeros_like(embedded) if step.hidden is None else step.hidden
        normed: Tensor = layer.before_attention(hidden)
        joined = torch.cat([self.embedding_norm(embedded), normed], dim=1)
        first = normed if self.names.norm_replaces else hidden
        delta, residual = self._run(step, first, lambda shared: layer.read(joined, first, shared, step.rows), joined)
        self.ops.add_and_scale(residual, delta, None)
        return residual

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return super().compute_logits(self.norm(hidden), out)
