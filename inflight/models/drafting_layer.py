"""`DraftingLayer`: a decoder layer that predicts drafts from hidden states of the served model (`HiddenInputsSpec`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.attention.backend import LayerStep
from inflight.config.architecture import ModelArchitecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.layers.context import LayerContext
from inflight.layers.layer_norm import make_norm
from inflight.layers.linear import RowParallelLinear
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.models.decoder import DecoderForCausalLM
from inflight.models.decoder_layer import DecoderLayer


class DraftingLayer(DecoderForCausalLM):
    """
    Args:
        architecture: that of the served model, with this layer only and with `hidden_inputs`.
        served: has the embedding and the head, if they are whole on this rank. Otherwise (None) the layer loads its own.
    """

    def __init__(self, architecture: ModelArchitecture, context: LayerContext, served: CausalLM | None) -> None:
        super().__init__(architecture, context, PipelineStage(0, 1, 1))
        spec = architecture.hidden_inputs
        assert spec is not None, "another model"
        self.names = spec
        self.embedding_norm, self.hidden_norm = make_norm(architecture, context), make_norm(architecture, context)
        size = architecture.hidden_size
        self.projection = RowParallelLinear(2 * size, size, bias=False, context=context)
        self.norm_name = spec.final_norm
        # The served model is no child of this one: its weights have been counted and loaded.
        self.served: tuple[DecoderForCausalLM, ...] = ()
        if isinstance(served, DecoderForCausalLM) and served.embed_tokens is not None and served.lm_head is not None:
            self.served = (served,)
            self.embed_tokens = self.lm_head = None

    def forward(self, step: ModelStep) -> Tensor:
        """Returns the hidden states behind the final norm, [num_rows, hidden_size]: the logits are made of them, and the next
        pass reads them."""
        rotations = tuple(rotary(step.positions) for rotary in self.rotaries)
        embedding = self.served[0].embed_tokens if self.served else self.embed_tokens
        assert embedding is not None
        embedded = embedding.embed(step.input_ids, step.positions, None)
        if self.embedding_scale != 1.0:
            embedded.mul_(self.embedding_scale)
        hidden = torch.zeros_like(embedded) if step.hidden is None else step.hidden
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=1)
        residual = self.projection(joined)  # [num_tokens, hidden_size]
        shared = LayerStep(rotations, step.attn_metadata)

        def compute() -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = self.layers[0](None, residual, shared, step.rows)
            return result

        inputs = (residual, *(tensor for rotation in rotations for tensor in rotation.tensors))
        delta, residual_of_rows = self.taped(compute, inputs, step.rows, step.attn_metadata)
        return self.norm.add_and_norm(delta, residual_of_rows)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.served[0].compute_logits(hidden, out) if self.served else super().compute_logits(hidden, out)

    def leaves_unread(self, name: str) -> bool:
        return True  # the other tensors are those of the served model

    def load_units(self) -> list[tuple[str, Loadable]]:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        units: list[tuple[str, Loadable]] = [
            (self.names.embedding_norm, self.embedding_norm),
            (self.names.hidden_norm, self.hidden_norm),
            (self.names.projection, self.projection),
            *layer.separate_units(self.names.layer),
            (self.names.layer, layer),
            (self.norm_name, self.norm),
        ]
        if self.embed_tokens is not None:
            units.append(("model.embed_tokens", self.embed_tokens))
        if self.lm_head is not None:
            units.append((self.head_name, self.lm_head))
        return units


def make_decoder(
    architecture: ModelArchitecture, served: CausalLM | None, context: LayerContext, stage: PipelineStage
) -> CausalLM:
    """`served`: see `DraftingLayer`; other models do not need it."""
    if architecture.hidden_inputs is None:
        return DecoderForCausalLM(architecture, context, stage)
    return DraftingLayer(architecture, context, served)
