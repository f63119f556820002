"""`TransformersForCausalLM`: a causal LM that the code of transformers computes, on Inflight's KV cache and linear layers.

A step is one row of tokens: [1, num_tokens], with the position of each token. transformers' attention functions are replaced by
`attention.py`; no cache object of transformers is used. The logits come from the code of the model's class around its decoder,
which adds a soft cap or a scale in some families: there, `_Hidden` takes the place of the decoder and returns the hidden states
that the decoder has computed before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.attention.backend import AttentionMetadata
from inflight.config.engine import ModelConfig
from inflight.config.partition import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.errors import CheckpointError, UnsupportedModelError
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.recurrent_state import RecurrentState
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import CausalLM
from inflight.models.transformers_fallback.adapters import replace_module
from inflight.models.transformers_fallback.attention import PackedAttention
from inflight.models.transformers_fallback.build import (
    build,
    find_layers,
    replace_head,
    replace_linears,
    warn_of_unknown_overrides,
)
from inflight.models.transformers_fallback.default_dtype import float32_by_default
from inflight.models.transformers_fallback.faster import replace_mlps, replace_norms
from inflight.models.transformers_fallback.self_check import check
from inflight.models.transformers_fallback.stages import cut
from inflight.models.transformers_fallback.weights import FallbackUnit, WeightPlan, missing_weights

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


def _named(inputs: Tensor) -> dict[str, Tensor]:
    """The argument of transformers' models for these inputs."""
    return {"inputs_embeds": inputs[None]} if inputs.is_floating_point() else {"input_ids": inputs.long()[None]}


class TransformersForCausalLM(CausalLM):
    """
    Args:
        stored: name -> shape of each tensor of the checkpoint; None if the model gets random weights.
        differ: whether two tensors of the checkpoint differ.

    Raises:
        UnsupportedModelError: transformers does not know the model, or it cannot run on Inflight's KV cache.
        CheckpointError: the checkpoint lacks weights.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        context: LayerContext,
        stage: PipelineStage,
        stored: Mapping[str, tuple[int, ...]] | None,
        differ: Callable[[str, str], bool],
    ) -> None:
        nn.Module.__init__(self)
        self.name, self.vocab_size = model_config.architecture.name, model_config.architecture.vocab_size
        self.max_model_len, self.hidden_size = model_config.max_model_len, model_config.architecture.hidden_size
        self.stage = stage
        self._model_config, self._tells = model_config, context.tp.rank == 0 and stage.is_last
        self.dtype, self.device = context.dtype, context.device
        self.lm = build(model_config, context)
        plan = None if stored is None else WeightPlan(self.lm, stored, differ)
        self._unread = set() if plan is None else plan.unread
        layers_name, layers = find_layers(self.lm)
        self.decoder_layers = cut(self.lm, layers_name, layers, stage)
        replace_norms(self.lm, context)
        replace_mlps(self.lm, layers_name, context)
        replace_linears(self.lm, layers_name, context)
        replace_head(self.lm, context)
        self.attention = PackedAttention(self.lm, context.backend, self.max_model_len)
        self._units = [
            (f"{layers_name}.{i}", FallbackUnit(self.lm, f"{layers_name}.{i}.", (), plan))
            for i in range(stage.start, stage.start + len(self.decoder_layers))
        ]
        self._units.append(("", FallbackUnit(self.lm, "", tuple(f"{name}." for name, _ in self._units), plan)))
        if plan is not None and (missing := missing_weights(self._units, plan, self.lm)):
            more = f" and {len(missing) - _MAX_NAMES_SHOWN} more" if len(missing) > _MAX_NAMES_SHOWN else ""
            raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:_MAX_NAMES_SHOWN])}{more}")
        self.first_position = 0

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
        with float32_by_default():
            out: ModelOutput = self.decoder(**_named(inputs), use_cache=False, **given)
        return out

    def first_positions(self) -> tuple[int, ...]:
        """The numbers that the position of a sequence's first token may have: some families count from the one after the id of
        padding."""
        padding = getattr(self.lm.config.get_text_config(), "pad_token_id", None)
        return (0,) if padding is None else (0, padding + 1)

    def find_decoder(self, inputs: Tensor) -> Tensor:
        """Finds the decoder: the first model that the whole one calls. Returns transformers' logits, [num_tokens, vocab_size].
        `inputs`: as for `run_decoder`.

        Raises:
            UnsupportedModelError: the model calls no other.
        """
        called: list[PreTrainedModel] = []
        inner = [each for each in self.lm.modules() if isinstance(each, PreTrainedModel) and each is not self.lm]
        hooks = [each.register_forward_pre_hook(lambda module, _: called.append(module)) for each in inner]
        with float32_by_default():
            logits: Tensor = self.lm(**_named(inputs), use_cache=False)["logits"][0]
        for hook in hooks:
            hook.remove()
        if not called:
            raise UnsupportedModelError("it has no decoder apart from its head")
        self.decoder = called[0]
        accepted = inspect.signature(self.decoder.forward).parameters
        self._takes = set(accepted)
        if any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
            self._takes.add("position_ids")
        return logits.float()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: tuple[AttentionMetadata, ...],
        rows: Tensor | None = None,
        layers: Sequence[int] | None = None,
        *,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        inputs = input_ids if intermediate is None else intermediate.delta
        with self.attention.step(attn_metadata, layers):
            hidden: Tensor = self.run_decoder(inputs, positions)["last_hidden_state"][0]
        if not self.stage.is_last:
            return IntermediateTensors(hidden, hidden)  # one of them would do
        return hidden if rows is None else hidden[rows]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        self._hidden.hidden = hidden[None]
        input_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with float32_by_default():
            logits = self.lm(input_ids=input_ids, use_cache=False)["logits"][0].float()
        self._hidden.hidden = None
        return logits.contiguous() if out is None else out.copy_(logits)

    def cache_users(self) -> list[Attention | RecurrentState]:
        return list(self.attention.layers.values())

    def leaves_unread(self, name: str) -> bool:
        return name in self._unread

    def load_units(self) -> list[tuple[str, Loadable]]:
        return list(self._units)

    def finish_loading(self) -> None:
        """Records the layers' attention, and compares the result with that of transformers.

        Raises:
            UnsupportedModelError: the model cannot be computed on the KV cache, or the results differ.
        """
        if self._tells:
            warn_of_unknown_overrides(self._model_config)
        with torch.no_grad():
            check(self)
        self.backend = self.attention.backend

    def set_output_class(self, output_class: type[ModelOutput]) -> None:
        """Called once, when the decoder has run: `output_class` is the type of its result."""
        self._hidden = _Hidden(self.decoder, output_class)
        replace_module(
            self.lm, next(name for name, each in self.lm.named_modules() if each is self.decoder), self._hidden
        )
