"""`DraftingLayer`: a decoder layer that predicts drafts from hidden states of the served model (`HiddenInputsSpec`)."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from inflight.attention.backend import LayerStep
from inflight.config.architecture import ModelArchitecture
from inflight.config.eagle import read_targets
from inflight.config.pipeline_stage import PipelineStage
from inflight.layers.context import LayerContext
from inflight.layers.layer_norm import make_norm
from inflight.layers.linear import RowParallelLinear
from inflight.layers.norm import RMSNorm
from inflight.layers.vocab import LogitsHead
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import ModelStep
from inflight.models.decoder import DecoderForCausalLM
from inflight.models.decoder_layer import DecoderLayer


class DraftingLayer(DecoderForCausalLM):
    """
    Args:
        architecture: that of the layer alone, with `hidden_inputs`.
        served: has the embedding and the head, both whole, unless the layer has its own.
    """

    def __init__(
        self, architecture: ModelArchitecture, context: LayerContext, served: DecoderForCausalLM | None
    ) -> None:
        super().__init__(architecture, context, PipelineStage(0, 1, 1))
        spec = architecture.hidden_inputs
        assert spec is not None, "another model"
        self.names = spec
        self.embedding_norm, self.hidden_norm = (
            None if name is None else make_norm(architecture, context)
            for name in (spec.embedding_norm, spec.hidden_norm)
        )
        size = architecture.hidden_size
        self.projection = RowParallelLinear(spec.captured_size or 2 * size, size, bias=spec.has_bias, context=context)
        # The served model is no child of this one: its weights have been counted and loaded.
        self.served: tuple[DecoderForCausalLM, ...] = () if served is None else (served,)
        if not spec.has_embedding:
            self.embed_tokens = None
        self.lm_head: LogitsHead | None = None
        if spec.head_size is not None:
            self.lm_head = LogitsHead(spec.head_size, size, tied_embedding=None, context=context)
        self.target_ids: Tensor | None = None  # int64 [head_size], see `eagle.read_targets`
        self.ops = context.ops
        self.device = context.device

    def read_hidden(self, hidden: Tensor) -> Tensor:
        """What the served model shows of n tokens -> [n, hidden_size], the first input of the layer."""
        return self.projection(hidden) if self.names.captured else hidden

    def read_targets(self, folder: Path) -> None:
        """Which tokens of the served model those of the own head are. Call it after the weights were loaded.

        Raises:
            CheckpointError: see `eagle.read_targets`.
        """
        targets = None if self.lm_head is None else read_targets(folder, self.vocab_size)
        if targets is not None:
            self.target_ids = torch.from_numpy(targets).to(self.device)

    def forward(self, step: ModelStep) -> Tensor:
        """Returns the hidden states that the next pass reads, [num_rows, hidden_size]. The logits are made of them, too."""
        embedded = self._embedded(step)
        hidden = torch.zeros_like(embedded) if step.hidden is None else step.hidden
        joined = torch.cat([_normed(self.embedding_norm, embedded), _normed(self.hidden_norm, hidden)], dim=1)
        residual: Tensor = self.projection(joined)  # [num_tokens, hidden_size]
        layer = self.layers[0]
        delta, residual = self._run(step, residual, lambda shared: layer(None, residual, shared, step.rows))
        if self.names.final_norm is not None:
            return self.norm.add_and_norm(delta, residual)
        self.ops.add_and_scale(residual, delta, None)
        return residual

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.lm_head is None:
            return self.served[0].compute_logits(hidden, out)
        logits: Tensor = self.lm_head(hidden)
        if self.target_ids is not None:
            wide = logits.new_full((len(logits), self.vocab_size), -torch.inf)
            logits = wide.index_copy_(1, self.target_ids, logits)
        return logits if out is None else out.copy_(logits)

    def _embedded(self, step: ModelStep) -> Tensor:
        """[num_tokens, hidden_size]."""
        embedding = self.served[0].embed_tokens if self.embed_tokens is None else self.embed_tokens
        assert embedding is not None
        embedded = embedding.embed(step.input_ids, step.positions, None)
        return embedded if self.embedding_scale == 1.0 else embedded.mul_(self.embedding_scale)

    def _run(
        self, step: ModelStep, first: Tensor, layer: Callable[[LayerStep], tuple[Tensor, Tensor]], *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`layer`'s (delta, residual), from a tape if there is one. `first`, `others`: [num_tokens, ...], what it reads."""
        rotations = tuple(rotary(step.positions) for rotary in self.rotaries)
        shared = LayerStep(rotations, step.attn_metadata)
        inputs = (first, *others, *(tensor for rotation in rotations for tensor in rotation.tensors))
        delta, residual = self.taped(lambda: layer(shared), inputs, step.rows, step.attn_metadata)
        return delta, residual

    def load_units(self) -> list[tuple[str, Loadable]]:
        spec = self.names
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        units: list[tuple[str, Loadable]] = []
        if self.embed_tokens is not None:
            units.append(("model.embed_tokens", self.embed_tokens))
        for name, norm in ((spec.embedding_norm, self.embedding_norm), (spec.hidden_norm, self.hidden_norm)):
            if name is not None and norm is not None:
                units.append((name, norm))
        units += [(spec.projection, self.projection), *layer.separate_units(spec.layer), (spec.layer, layer)]
        if spec.final_norm is not None:
            units.append((spec.final_norm, self.norm))
        if self.lm_head is not None:
            units.append(("lm_head", self.lm_head))
        return units


def _normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    normed: Tensor = norm(x)
    return normed
