"""`DecoderForCausalLM`: the decoder that a `ModelArchitecture` describes, of whatever family.

Each layer reads its own entry of `ModelArchitecture.layers`: numbers of heads, widths, window, rotary embedding, biases, norms.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor, nn

from inflight.attention.backend import LayerStep
from inflight.config.architecture import ModelArchitecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.decoder_attention import DecoderAttention
from inflight.layers.mixer import MixerPlace
from inflight.layers.norm import RMSNorm
from inflight.layers.rotary import RotaryEmbedding
from inflight.layers.token_inputs import TokenInput, TokenInputs
from inflight.layers.vocab import LogitsHead, VocabParallelEmbedding
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.models.layer_kinds import MIXERS, MLPS
from inflight.models.taped_layers import TapedLayers


def _norm(architecture: ModelArchitecture, context: LayerContext, *, reads_stream: bool = False) -> RMSNorm:
    """`reads_stream`: its input is the residual stream, and not what a layer adds to it."""
    eps = architecture.stream_eps if reads_stream and architecture.stream_eps is not None else architecture.rms_norm_eps
    return RMSNorm(architecture.hidden_size, eps, context, offset=architecture.norm_offset)


class DecoderLayer(Loadable):
    """Mixer and MLP. The input of each is the residual stream, and its output is added to the stream. `LayerSpec.norms`
    says which inputs and outputs have a norm.

    The MLP's output is added by the next layer. If the next layer begins with a norm, one kernel both adds and norms.
    """

    def __init__(self, place: MixerPlace) -> None:
        super().__init__()
        architecture, context = place.architecture, place.context
        spec = architecture.layers[place.layer]
        names = spec.norms
        sizes = (architecture.hidden_size, architecture.rms_norm_eps)
        self.before_attention = _norm(architecture, context, reads_stream=True) if names.before_attention else None
        self.self_attn = MIXERS[type(spec.mixer)](spec.mixer, place)
        self.after_attention = _norm(architecture, context) if names.after_attention else None
        self.before_mlp = _norm(architecture, context, reads_stream=True) if names.before_mlp else None
        self.mlp = MLPS[type(spec.mlp)](architecture.hidden_size, spec.mlp, context)
        self.after_mlp = _norm(architecture, context) if names.after_mlp else None
        inputs = architecture.token_inputs
        self.token_input = None if inputs is None else TokenInput(*sizes, inputs, context)
        ones = torch.ones(1, dtype=torch.float32, device=context.device)
        self.scalar = nn.Parameter(ones, False) if spec.has_scalar else None
        self.norm_names, self.ops, self.layer = names, context.ops, place.layer

    def weight_slots(self, prefix: str) -> WeightSlots:
        names = asdict(self.norm_names) | {"self_attn": self.self_attn.name}
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
        self.stage = stage
        self.unread = architecture.unread
        self.embedding_scale = architecture.embedding_scale
        if architecture.rounds_embedding_scale:
            self.embedding_scale = float(torch.tensor(self.embedding_scale, dtype=context.dtype, device="cpu"))
        self.logits_scale, self.logits_cap = architecture.logits_scale, architecture.logits_cap
        self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden_size, context) if stage.is_first else None
        # one rotation per step for each kind of rotary embedding among the layers
        mixers = [layer.mixer for layer in architecture.layers[stage.start : stage.stop]]
        index_of = {
            kind: index for index, kind in enumerate(dict.fromkeys(filter(None, (each.rotation for each in mixers))))
        }
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope, head_dim, context) for rope, head_dim in index_of)
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
            layers.append(DecoderLayer(place))
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
        if not self.stage.is_last:
            return IntermediateTensors(delta, residual)
        return self.norm.add_and_norm(delta, residual)

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
            units += [*layer.separate_units(f"model.layers.{index}"), (f"model.layers.{index}", layer)]
        if self.stage.is_last:
            units += [("model.norm", self.norm), (self.head_name, self.lm_head)]
        return units
