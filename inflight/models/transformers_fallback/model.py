"""`TransformersForCausalLM`: a causal LM that the code of transformers computes, on Inflight's KV cache and linear layers.

A step is one row of tokens: [1, num_tokens], with the position of each token. transformers' attention functions are replaced by
`attention.py`; no cache object of transformers is used. The logits come from the code of the model's class around its decoder,
which adds a soft cap or a scale in some families: there, `_Hidden` takes the place of the decoder and returns the hidden states
that the decoder has computed before.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.config.engine import ModelConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.config.unknown_family import native_refusal
from inflight.config.weight_format import PLAIN
from inflight.config.whole_prompts import is_causal
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.errors import CheckpointError
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.gated_mlp import GatedMLP
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.pooler import Pooler
from inflight.layers.recurrent_state import RecurrentState
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.models.transformers_fallback.adapters import Adapter, FusedAdapter, replace_module
from inflight.models.transformers_fallback.attention import PackedAttention
from inflight.models.transformers_fallback.build import (
    build,
    find_layers,
    leave_out_towers,
    replace_head,
    replace_linears,
    warn_of_unknown_overrides,
)
from inflight.models.transformers_fallback.default_dtype import float32_by_default
from inflight.models.transformers_fallback.faster import replace_mlps, replace_norms
from inflight.models.transformers_fallback.self_check import check
from inflight.models.transformers_fallback.stages import cut
from inflight.models.transformers_fallback.truth import Truth, accepted, named
from inflight.models.transformers_fallback.weights import Checkpoint, make_units, missing_weights
from inflight.models.vision.tower import VisionTower
from inflight.models.vision.towers import make_tower

_MAX_NAMES_SHOWN = 8


class _Hidden(nn.Module):
    """Stands for the decoder: it returns the hidden states that it was given. It has the decoder's other attributes."""

    def __init__(self, decoder: nn.Module, output_class: type[ModelOutput]) -> None:
        super().__init__()
        self._output_class = output_class
        self._decoder = (decoder,)  # not a module of this one
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:  # Any: the decoder's
        return getattr(self.__dict__["_decoder"][0], name)

    def forward(self, *_: Any, **__: Any) -> ModelOutput:  # Any: each family passes its own arguments
        return self._output_class(last_hidden_state=self.hidden)


class TransformersForCausalLM(CausalLM):
    """
    Raises:
        UnsupportedModelError: transformers does not know the model, or it cannot run on Inflight's KV cache.
        CheckpointError: the checkpoint lacks weights.
    """

    def __init__(
        self, model_config: ModelConfig, context: LayerContext, stage: PipelineStage, checkpoint: Checkpoint
    ) -> None:
        nn.Module.__init__(self)
        architecture = model_config.architecture
        self.makes_vectors = architecture.pooler is not None
        self.is_causal = is_causal(architecture)
        self.pooler = None
        if architecture.pooler is not None and stage.is_last:
            self.pooler = Pooler(architecture.pooler, context)
        self.tower: VisionTower | None = None
        self.name = model_config.architecture.name
        self.vocab_size = model_config.architecture.vocab_size
        self.max_model_len = model_config.max_model_len
        self.hidden_size = model_config.architecture.hidden_size
        self.native_refusal = native_refusal(model_config.architecture)
        self.stage = stage
        self._model_config = model_config
        self._tells = context.tp.rank == 0 and stage.is_last
        self.dtype = context.dtype
        self.device = context.device
        self.is_quantized = (
            model_config.quantization.layers is not None or model_config.architecture.weight_format != PLAIN
        )
        self.lm = build(model_config, context)
        plan = checkpoint.plan(self.lm)
        towers = leave_out_towers(self.lm)
        self._unread = set() if plan is None else plan.unread | plan.sources_of(towers)
        vision = model_config.architecture.vision
        if stage.is_first and vision is not None:
            self.tower = make_tower(vision, context, self._embed)
            self.tower.read_names(checkpoint.stored)
        layers_name, layers = find_layers(self.lm)
        self.decoder_layers = cut(self.lm, layers_name, layers, stage)
        replace_norms(self.lm, context)
        replace_mlps(self.lm, layers_name, context)
        replace_linears(self.lm, layers_name, context)
        replace_head(self.lm, context)
        self.attention = PackedAttention(self.lm, context.backend, self.max_model_len, is_causal=self.is_causal)
        self._units = make_units(self.lm, layers_name, stage.start, len(self.decoder_layers), plan)
        if plan is not None and (missing := missing_weights(self._units, plan, self.lm)):
            more = f" and {len(missing) - _MAX_NAMES_SHOWN} more" if len(missing) > _MAX_NAMES_SHOWN else ""
            raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:_MAX_NAMES_SHOWN])}{more}")
        self.first_position = 0
        self._make_truth = partial(Truth, model_config, context, stage, checkpoint, _replaced(self.lm))

    def run_decoder(self, inputs: Tensor, positions: Tensor | None) -> ModelOutput:
        """inputs: token ids [num_tokens] or, on later stages, hidden states [num_tokens, hidden_size]. positions [num_tokens];
        without them, transformers counts positions itself."""
        given: dict[str, object] = {}
        if positions is not None and "position_ids" in self._takes:
            given["position_ids"] = positions.long()[None] + self.first_position
        if positions is not None and self.attention.states is not None:
            given |= {
                name: self.attention.states for name in ("past_key_values", "cache_params") if name in self._takes
            }
        if not self.is_causal and "token_type_ids" in self._takes:  # GPT-2 takes them as tokens
            given["token_type_ids"] = torch.zeros(1, len(inputs), dtype=torch.int64, device=inputs.device)
        with float32_by_default():
            out: ModelOutput = self.decoder(**named(inputs), use_cache=False, **given)
        return out

    def _embed(self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """token_ids [num_tokens] -> [num_tokens, hidden_size]. Only on the first stage."""
        embedded: Tensor = self.lm.get_input_embeddings()(token_ids.long())
        return embedded

    def forward(self, step: ModelStep) -> Tensor | IntermediateTensors:
        inputs = step.input_ids if step.intermediate is None else step.intermediate.delta
        if step.images is not None:
            inputs = self._embed(inputs, step.positions, None)
            step.images.replace_in(inputs)
        with self.attention.step(step.attn_metadata, step.layers):
            hidden: Tensor = self.run_decoder(inputs, step.positions)["last_hidden_state"][0]
        if not self.stage.is_last:
            return IntermediateTensors(hidden, hidden)  # one of them would do
        return hidden if step.rows is None else hidden[step.rows]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        if self.makes_vectors:  # only measurements at the start ask for logits
            return hidden.new_zeros(len(hidden), self.vocab_size, dtype=torch.float32)
        self._hidden.hidden = hidden[None]
        input_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with float32_by_default():
            logits = self.lm(input_ids=input_ids, use_cache=False)["logits"][0].float()
        self._hidden.hidden = None
        return logits.contiguous() if out is None else out.copy_(logits)

    def cache_users(self) -> list[Attention | RecurrentState]:
        return list(self.attention.layers.values())

    def leaves_unread(self, name: str) -> bool:
        return name in self._unread or (self.tower is not None and self.tower.leaves_unread(name))

    def load_units(self) -> list[tuple[str, Loadable]]:
        towers = [] if self.tower is None else self.tower.load_units()
        poolers: list[tuple[str, Loadable]] = [] if self.pooler is None else [("", self.pooler)]
        return [*self._units, *((f"tower{prefix}", unit) for prefix, unit in towers), *poolers]

    def finish_loading(self) -> None:
        """Records the layers' attention, and compares the result with that of transformers.

        Raises:
            UnsupportedModelError: the model cannot be computed on the KV cache, or the results differ.
        """
        if self._tells:
            warn_of_unknown_overrides(self._model_config)
        with torch.no_grad(), float32_by_default():
            check(self, self._make_truth)
        del self._make_truth
        self.backend = self.attention.backend

    def set_decoder(self, name: str, output_class: type[ModelOutput], first_position: int) -> None:
        """Called once, after `Truth` has run; see `Result` there."""
        decoder = self.lm.get_submodule(name)
        assert isinstance(decoder, PreTrainedModel)
        self.decoder = decoder
        self._takes = accepted(decoder)
        self.first_position = first_position
        self._hidden = _Hidden(decoder, output_class)
        replace_module(self.lm, name, self._hidden)


def _replaced(model: PreTrainedModel) -> dict[str, bool]:
    """The names of the linear layers that Inflight's own stand for -> whether their input features are divided."""
    found: dict[str, bool] = {}
    for name, module in model.named_modules():
        if isinstance(module, Adapter) and isinstance(module.inner, GatedMLP):
            found |= {f"{name}.gate_proj": False, f"{name}.up_proj": False, f"{name}.down_proj": True}
        elif isinstance(module, FusedAdapter) and isinstance(module.inner, ColumnParallelLinear):
            found |= {f"{name.rpartition('.')[0]}.{leaf}": False for leaf in module.inner.parts}
        elif isinstance(module, Adapter):
            found[name] = isinstance(module.inner, RowParallelLinear)
    return found
