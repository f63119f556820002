"""`Truth`: what transformers alone computes, with its own modules, in float32.

The truth has nothing of Inflight: no divided, fused or packed weights, no KV cache, and the attention is transformers' eager
one. Its weights are loaded from the checkpoint a second time, in the engine's dtype, and then become float32. So they are
rounded as the engine's weights are. One decoder layer at a time has weights: they are loaded when the layer is called, and
freed after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.config.engine import ModelConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.errors import UnsupportedModelError
from inflight.kernels.quantized_weight import fitting_group_size, quantize_rows
from inflight.layers.context import LayerContext
from inflight.models.transformers_fallback.build import build, find_layers, leave_out_towers
from inflight.models.transformers_fallback.expert_routing import ExpertRouting
from inflight.models.transformers_fallback.stages import cut
from inflight.models.transformers_fallback.weights import Checkpoint, FallbackUnit, make_units

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # Any: each family has its own
ROUTING_TOLERANCE = 0.05  # of the scores that experts are chosen by, in less than float32
# What layers may return around the hidden states. A layer that is left out has to return the same.
_RESULTS: tuple[Callable[[Tensor], object], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden,),
    lambda hidden: (hidden, None),
    lambda hidden: (hidden, None, None),
)


@dataclass
class LayerTruth:
    """One call of a decoder layer. `inputs` and `outputs`: [..., num_tokens, hidden_size] of each sequence. `plain`: the
    outputs of the same modules in the engine's dtype; empty if this is float32, or if they do not run in it. `routings`: what
    the layer's routers chose for each sequence, see `ExpertRouting`."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    plain: list[Tensor] = field(default_factory=list)
    routings: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Result:
    """
    Attributes:
        layers: of each call of a decoder layer, in the order of the calls.
        hidden: the decoder's result for the first sequence [num_tokens, hidden_size].
        logits: for the first sequence [num_tokens, vocab_size].
        first_position: the number that the position of a sequence's first token has: some families count from the one after
            the id of padding.
        decoder: the decoder's name in the model.
        output_class: of the decoder's result.
    """

    layers: list[LayerTruth]
    hidden: Tensor
    logits: Tensor
    first_position: int
    decoder: str
    output_class: type[ModelOutput]


class Truth:
    """`replaced`: the names of linear layers that Inflight's own stand for -> whether their input features are divided among
    the ranks.

    Raises:
        UnsupportedModelError: transformers cannot build the model.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        context: LayerContext,
        stage: PipelineStage,
        checkpoint: Checkpoint,
        replaced: Mapping[str, bool],
    ) -> None:
        self.lm: PreTrainedModel = build(model_config, context, "eager")
        plan = checkpoint.plan(self.lm)
        leave_out_towers(self.lm)
        self._name, layers = find_layers(self.lm)
        self._layers = cut(self.lm, self._name, layers, stage)
        self._units = make_units(self.lm, self._name, stage.start, len(self._layers), plan)
        self._load = checkpoint.load
        self._dtype = context.dtype
        self._num_ranks = context.tp.size
        self._quantization = model_config.quantization
        self._replaced = replaced

    def run(self, tokens: Tensor, others: Tensor, other_positions: Tensor) -> Result:
        """tokens: a sequence from its first position on; others: another sequence, at `other_positions`. Both are token ids
        [num_tokens] or, on later stages, hidden states [num_tokens, hidden_size].

        Raises:
            UnsupportedModelError: the model has no decoder, or no decoder layers.
        """
        self._fill(self._units[-1])
        decoder = self._find_decoder(tokens)
        truth = self._leave_out(decoder, tokens, None)
        counted = torch.arange(len(tokens), dtype=torch.int64, device=tokens.device)
        first_position = 0
        padding = getattr(self.lm.config.get_text_config(), "pad_token_id", None)
        if padding is not None:
            own = [self._leave_out(decoder, tokens, counted + each)[0] for each in (0, padding + 1)]
            wanted = hidden_of(*truth[0])
            equal = [torch.allclose(hidden_of(*each), wanted, rtol=0, atol=1e-3) for each in own]
            first_position = padding + 1 if equal == [False, True] else 0
        calls = self._leave_out(decoder, others, other_positions + first_position)
        found: list[Any] = []
        layers: list[LayerTruth] = []
        handle = decoder.register_forward_hook(lambda _, __, output: found.append(output))
        with self._with_layers(layers, calls):
            logits = self.lm(**named(tokens), use_cache=False)["logits"][0]
        handle.remove()
        if not isinstance(found[0], ModelOutput) or "last_hidden_state" not in found[0]:
            raise UnsupportedModelError("its decoder returns no last_hidden_state")
        return Result(
            layers=layers,
            hidden=found[0]["last_hidden_state"][0],
            logits=logits,
            first_position=first_position,
            decoder=next(name for name, each in self.lm.named_modules() if each is decoder),
            output_class=type(found[0]),
        )

    def run_second(self, wanted: Result, others: Tensor, other_positions: Tensor) -> None:
        """Runs the second sequence by itself, and puts the results into `wanted`. `run` has taken the arguments of its layers
        from a run without layers. This is wrong if they depend on what other layers have computed, beyond the hidden states."""
        decoder = self.lm.get_submodule(wanted.decoder)
        assert isinstance(decoder, PreTrainedModel)
        layers: list[LayerTruth] = []
        with self._with_layers(layers, None):
            decoder(**named(others), **_given(decoder, other_positions + wanted.first_position), use_cache=False)
        for truth, own in zip(wanted.layers, layers, strict=True):
            truth.inputs[1] = own.inputs[0]
            truth.outputs[1] = own.outputs[0]
            truth.routings[1] = own.routings[0]
            truth.plain[1:] = own.plain

    def _find_decoder(self, tokens: Tensor) -> PreTrainedModel:
        """The first model that the whole one calls."""
        called: list[PreTrainedModel] = []

        def note(module: nn.Module, _: object) -> None:
            assert isinstance(module, PreTrainedModel)
            called.append(module)
            raise _Found

        inner = [each for each in self.lm.modules() if isinstance(each, PreTrainedModel) and each is not self.lm]
        hooks = [each.register_forward_pre_hook(note) for each in inner]
        try:
            self.lm(**named(tokens), use_cache=False)
        except _Found:
            return called[0]
        finally:
            for hook in hooks:
                hook.remove()
        raise UnsupportedModelError("it has no decoder apart from its head")

    def _leave_out(self, decoder: PreTrainedModel, inputs: Tensor, positions: Tensor | None) -> list[_Arguments]:
        """Runs the decoder without its layers. Returns the arguments that the layers get."""
        given = {} if positions is None else _given(decoder, positions)
        problem: Exception | None = None
        for make in _RESULTS:
            calls: list[_Arguments] = []
            kept = [layer.__dict__.get("forward") for layer in self._layers]
            for layer in self._layers:
                layer.forward = partial(_pass_on, calls, make)
            try:
                decoder(**named(inputs), **given, use_cache=False)
                shapes = {hidden_of(*call).shape for call in calls}
                if len(calls) >= len(self._layers) and len(shapes) == 1:
                    return calls
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
                problem = error
            finally:
                for layer, before in zip(self._layers, kept, strict=True):
                    del layer.forward
                    if before is not None:
                        layer.forward = before
        raise UnsupportedModelError("its decoder layers were not found") from problem

    @contextmanager
    def _with_layers(self, found: list[LayerTruth], calls: list[_Arguments] | None) -> Iterator[None]:
        """Inside, each layer has weights while it runs, and its results are added to `found`. If `calls` is given, it also runs
        on the second sequence, with these arguments."""
        routings: list[ExpertRouting] = []
        own_calls: list[_Arguments] = []

        def before(number: int, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Arguments:
            self._fill(self._units[number])
            call = _rounded((arguments, keywords), self._dtype)
            found.append(LayerTruth(inputs=[hidden_of(*call)]))
            own_calls.append(_in_dtype(call, self._dtype))  # before the layer changes anything
            routings.append(open_routing.enter_context(ExpertRouting(hidden_of(*call).shape[-2])))
            return call

        def after(number: int, layer: nn.Module, _: Any, output: Any) -> None:
            open_routing.close()
            now = found[-1]
            plain_calls = [own_calls[-1]]
            now.outputs.append(first(output).clone())
            now.routings.append(routings[-1].noted)
            if calls is not None:
                call = calls[len(found) - 1]
                if len(found) > 1:
                    call = with_hidden(*call, found[-2].outputs[1])
                call = _rounded(call, self._dtype)
                plain_calls.append(_in_dtype(call, self._dtype))
                now.inputs.append(hidden_of(*call))
                with ExpertRouting(hidden_of(*call).shape[-2]) as routing:
                    now.outputs.append(first(layer.forward(*call[0], **call[1])).clone())
                now.routings.append(routing.noted)
            if self._dtype != torch.float32:
                self._units[number][1].to_own_dtypes()
                now.plain = self._run_plain(layer, plain_calls, now.routings)
            self._units[number][1].free()

        # a layer that fails closes its `ExpertRouting`, too
        with ExitStack() as open_routing, hooked(self._layers, before, after):
            yield

    def _run_plain(
        self, layer: nn.Module, calls: list[_Arguments], routings: list[list[tuple[Tensor, Tensor]]]
    ) -> list[Tensor]:
        found = []
        try:
            for call, known in zip(calls, routings, strict=True):
                with ExpertRouting(hidden_of(*call).shape[-2], known, ROUTING_TOLERANCE):
                    found.append(first(layer.forward(*call[0], **call[1])).float())
        except (RuntimeError, TypeError, ValueError):  # the code needs float32
            return []
        return found

    def _fill(self, unit: tuple[str, FallbackUnit]) -> None:
        prefix, block = unit
        self._load(block, prefix)
        head = self.lm.get_output_embeddings()
        for name, module in block.modules_of_unit.items():
            kind = self._quantization.head if module is head else self._quantization.layers
            if (
                kind in ("int8", "int4")
                and isinstance(module, nn.Linear)
                and (module is head or name in self._replaced)
            ):
                parts = self._num_ranks if self._replaced.get(name) else 1
                module.weight.data = self._quantized(module.weight.data, 8 if kind == "int8" else 4, parts)
        block.to_float32()

    def _quantized(self, weight: Tensor, bits: int, num_parts: int) -> Tensor:
        """The weight, rounded as the engine rounds it when it quantizes it."""

        def rounded(part: Tensor) -> Tensor:
            group_size = fitting_group_size(part.shape[1], self._quantization.group_size)
            return quantize_rows(
                part.contiguous(), bits=bits if group_size else 8, group_size=group_size or 0
            ).dequantize()

        return torch.cat([rounded(part) for part in weight.chunk(num_parts, dim=1)], dim=1)


class _Found(Exception):
    """The decoder is called."""


def named(inputs: Tensor) -> dict[str, Tensor]:
    """The argument of transformers' models for token ids [num_tokens], or hidden states [num_tokens, hidden_size]."""
    if inputs.is_floating_point():
        return {"inputs_embeds": inputs[None]}
    return {"input_ids": inputs.long()[None]}


def accepted(decoder: PreTrainedModel) -> set[str]:
    """The names of the arguments that a decoder takes."""
    parameters = inspect.signature(decoder.forward).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {*parameters, *(("position_ids",) if open_ended else ())}


def _given(decoder: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    if "position_ids" not in accepted(decoder):
        return {}
    return {"position_ids": positions[None]}


def first(output: Any) -> Tensor:  # Any: each family has its own
    """The hidden states in the result of a layer."""
    hidden: Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


def hidden_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer."""
    hidden: Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return hidden


def with_hidden(arguments: tuple[Any, ...], keywords: dict[str, Any], hidden: Tensor) -> _Arguments:
    """The arguments of a layer, with other hidden states."""
    if arguments:
        return ((hidden, *arguments[1:]), keywords)
    return ((), {**keywords, "hidden_states": hidden})


@contextmanager
def hooked(
    layers: nn.ModuleList,
    before: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], _Arguments],
    after: Callable[[int, nn.Module, tuple[Any, ...], Any], None],
) -> Iterator[None]:
    """Inside, each call of a layer is preceded by `before`, which gives its arguments, and followed by `after`. Both get the
    layer's number first."""
    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            for handle in (
                layer.register_forward_pre_hook(partial(before, i), with_kwargs=True),
                layer.register_forward_hook(partial(after, i)),
            ):
                stack.callback(handle.remove)
        yield


def _rounded(call: _Arguments, dtype: torch.dtype) -> _Arguments:
    """With the hidden states as the engine can have them."""
    return with_hidden(*call, hidden_of(*call).to(dtype).float())


def _in_dtype(call: _Arguments, dtype: torch.dtype) -> _Arguments:
    """A copy, with floats in this dtype."""

    def change(value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    changed: _Arguments = _pytree.tree_map(change, call)
    return changed


def _pass_on(calls: list[_Arguments], make: Callable[[Tensor], object], *arguments: Any, **keywords: Any) -> object:
    calls.append((arguments, keywords))
    return make(hidden_of(*calls[-1]))
