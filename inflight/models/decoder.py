"""`DecoderForCausalLM`: the decoder that a `ModelArchitecture` describes, of whatever family.

Each layer reads its own entry of `ModelArchitecture.layers`: numbers of heads, widths, window, rotary embedding, biases, norms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.attention.backend import LayerStep
from inflight.config.architecture import ModelArchitecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.layers.added_embeddings import make_embedding
from inflight.layers.attention import Attention
from inflight.layers.biased_head import BiasedHead
from inflight.layers.context import LayerContext
from inflight.layers.decoder_attention import DecoderAttention
from inflight.layers.layer_norm import make_norm
from inflight.layers.mixer import MixerPlace
from inflight.layers.mrope import make_rotary
from inflight.layers.pooler import Pooler
from inflight.layers.token_inputs import TokenInputs
from inflight.layers.vocab import LogitsHead
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.models.decoder_layer import DecoderLayer
from inflight.models.shared_layers import SharedLayers
from inflight.models.taped_layers import TapedLayers
from inflight.models.vision.tower import VisionTower
from inflight.models.vision.towers import make_tower


class DecoderForCausalLM(CausalLM):
    """The decoder with its embedding and head, or one pipeline stage of it."""

    layer_type = DecoderLayer

    def __init__(self, architecture: ModelArchitecture, context: LayerContext, stage: PipelineStage) -> None:
        nn.Module.__init__(self)
        vocab_size, hidden_size = architecture.vocab_size, architecture.hidden_size
        self.stage = stage
        self.pooler: Pooler | None = None
        self.unread = architecture.unread
        self.embedding_scale = architecture.embedding_scale
        if architecture.rounds_embedding_scale:
            self.embedding_scale = float(torch.tensor(self.embedding_scale, dtype=context.dtype, device="cpu"))
        self.logits_scale, self.logits_cap = architecture.logits_scale, architecture.logits_cap
        self.embed_tokens = make_embedding(architecture, context) if stage.is_first else None
        self.tower: VisionTower | None = None
        if stage.is_first and architecture.vision is not None:
            self.tower = make_tower(architecture.vision, context, self.embed)
        # one rotation per step for each kind of rotary embedding among the layers
        mixers = [layer.mixer for layer in architecture.layers[stage.start : stage.stop]]
        index_of = {
            kind: index for index, kind in enumerate(dict.fromkeys(filter(None, (each.rotation for each in mixers))))
        }
        self.rotaries = nn.ModuleList(make_rotary(rope, head_dim, context) for rope, head_dim in index_of)
        layers: list[DecoderLayer] = []
        for layer, mixer in enumerate(mixers, stage.start):
            owner: Attention | None = None
            if mixer.kv_layer is not None:
                owning = layers[mixer.kv_layer - stage.start].self_attn
                assert isinstance(owning, DecoderAttention), "it has no keys and values"
                owner = owning.attn
            rotation_index = 0 if mixer.rotation is None else index_of[mixer.rotation]
            place = MixerPlace(
                architecture=architecture, layer=layer, rotation_index=rotation_index, context=context, owner=owner
            )
            layers.append(self.layer_type(place))
        self.layers = nn.ModuleList(layers)
        self.shared = SharedLayers(layers, architecture.layers[stage.start : stage.stop], stage.start)
        sizes = hidden_size, architecture.rms_norm_eps
        self.token_inputs: TokenInputs | None = None
        if architecture.token_inputs is not None:
            assert stage.is_first and stage.is_last, "the sizes were checked at start"
            self.token_inputs = TokenInputs(len(self.layers), *sizes, architecture.token_inputs, context)
        if stage.is_last:
            self.norm = make_norm(architecture, context, reads_stream=True)
            self.norm_name = architecture.final_norm
            self.vocab_size = vocab_size
            self.pooler = None if architecture.pooler is None else Pooler(architecture.pooler, context)
        self.lm_head: LogitsHead | None = None
        if stage.is_last and architecture.has_head:
            # if the embedding is on another stage, a tied head reads the embedding's weights itself
            self.head_name = "model.embed_tokens" if architecture.tie_word_embeddings else "lm_head"
            tied = self.embed_tokens if architecture.tie_word_embeddings else None
            make_head = BiasedHead if architecture.head_bias else LogitsHead
            self.lm_head = make_head(vocab_size, hidden_size, tied_embedding=tied, context=context)
        self.taped = TapedLayers(self, context)

    def forward(self, step: ModelStep) -> Tensor | IntermediateTensors:
        rotations = tuple(rotary.forward(step.positions) for rotary in self.rotaries)
        delta: Tensor | None = None
        residual: Tensor
        if self.embed_tokens is not None:
            residual = self.embed(step.input_ids, step.positions, step.token_types)
        else:
            assert step.intermediate is not None, "only the first stage has an embedding"
            delta, residual = step.intermediate.delta, step.intermediate.residual
        added = None if step.images is None else step.images.replace_in(residual)
        rows = step.rows if self.stage.is_last else None
        token_inputs: Tensor | None = None
        if self.token_inputs is not None:
            image_rows = None if step.images is None else step.images.rows
            token_inputs = self.token_inputs(step.input_ids, residual, image_rows)
        shared = LayerStep(rotations, step.attn_metadata, token_inputs, step.captured)

        def compute() -> tuple[Tensor, ...]:
            *others, last = range(len(self.layers)) if step.layers is None else step.layers
            result: tuple[Tensor | None, Tensor] = delta, residual
            for index in others:
                result = self.layers[index](*result, shared)
                if added is not None:
                    added.add_behind(index, result[1])
            is_added = added is not None and added.reaches(last, residual.shape[1])
            hidden, stream = self.layers[last](*result, shared, None if is_added else rows)
            if added is not None and is_added:
                added.add_behind(last, stream)
                if rows is not None:
                    hidden, stream = hidden[rows], stream[rows]
            return (self.norm.add_and_norm(hidden, stream),) if self.stage.is_last else (hidden, stream)

        inputs = (residual, delta, token_inputs, step.captured, *(x for each in rotations for x in each.tensors))
        has_tape = step.layers is None and added is None  # of all layers, with nothing between them
        results = self.taped(compute, inputs, rows, step.attn_metadata) if has_tape else compute()
        return results[0] if self.stage.is_last else IntermediateTensors(results[0], results[1], step.captured)

    def embed(self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """token_ids [num_tokens] -> [num_tokens, hidden_size]. Only on the first stage."""
        assert self.embed_tokens is not None
        embedded = self.embed_tokens.embed(token_ids, positions, token_types)
        return embedded if self.embedding_scale == 1.0 else embedded.mul_(self.embedding_scale)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.lm_head is None:
            zeros = hidden.new_empty((len(hidden), self.vocab_size), dtype=torch.float32) if out is None else out
            return zeros.zero_()
        logits = self.lm_head.forward(hidden, out)
        if self.logits_scale != 1.0:
            logits.mul_(self.logits_scale)
        if self.logits_cap is not None:
            logits.div_(self.logits_cap).tanh_().mul_(self.logits_cap)
        return logits

    def leaves_unread(self, name: str) -> bool:
        if name.startswith(self.unread) or f"model.{name}".startswith(self.unread):
            return True
        return self.tower is not None and self.tower.leaves_unread(name)

    def load_units(self) -> list[tuple[str, Loadable]]:
        units: list[tuple[str, Loadable]] = []
        if self.embed_tokens is not None:
            units.append(("model.embed_tokens", self.embed_tokens))
        if self.tower is not None:
            units += self.tower.load_units()
        if self.token_inputs is not None:
            units.append(("model.token_inputs", self.token_inputs))
        units += self.shared.load_units()
        if self.stage.is_last:
            units.append((self.norm_name, self.norm))
        if self.lm_head is not None:
            units.append((self.head_name, self.lm_head))
        if self.pooler is not None:
            units.append(("", self.pooler))
        return units
