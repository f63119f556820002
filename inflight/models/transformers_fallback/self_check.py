"""`check`: compares a model on Inflight's KV cache with what transformers alone computes, before the first request.

Two sequences of random tokens run through transformers' own modules, see `Truth`. The same tokens run on a temporary KV cache:
three chunks of each sequence and then single tokens, both sequences in one step; an encoder's sequences run whole. The
positions of the second sequence are the last ones that a request may have.

Each decoder layer gets the inputs that it has in the truth, so that roundings do not add up, and a difference belongs to the
layer in which it appears. What is compared is the layer's update (output minus input) of each token, as a part of the size of
this update. So no large residual and no other token hides a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inflight.attention.metadata import AttentionInputs
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.errors import UnsupportedModelError
from inflight.models.causal_lm import ModelStep
from inflight.models.transformers_fallback.adapters import Adapter
from inflight.models.transformers_fallback.expert_routing import ExpertRouting
from inflight.models.transformers_fallback.states import PackedStates
from inflight.models.transformers_fallback.truth import LayerTruth, Result, Truth, first, hidden_of, hooked, with_hidden

if TYPE_CHECKING:
    from inflight.models.transformers_fallback.model import TransformersForCausalLM

logger = logging.getLogger(__name__)

NUM_TOKENS, _NUM_DECODES = (24, 14), 5  # of each sequence; of them, single tokens at the end
_BLOCK_SIZE = 16
# The largest difference of a token, as a part of its own update. Kernels for quantized weights round their inputs to 8 bits.
# Some layers enlarge roundings, for example with a threshold. Where transformers' own modules in the engine's dtype differ from
# those in float32 by more, twice their largest difference is allowed, up to a limit.
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
_TOLERANCE_QUANTIZED = 0.1
_TIMES_PLAIN = 2.0
_MOST = 0.3


def check(model: TransformersForCausalLM, make_truth: Callable[[], Truth]) -> None:
    """
    Raises:
        UnsupportedModelError: the model does not run, or a result differs. The message names the first layer that differs.
    """
    try:
        with _products_in_float32():
            _check(model, make_truth())
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError) as error:
        raise UnsupportedModelError(
            f"{model.name} cannot be computed by transformers on Inflight's KV cache: {_cause(error)}{model.native_refusal}"
        ) from error


@contextmanager
def _products_in_float32() -> Iterator[None]:
    """Inside, torch computes products of float32 in float32. The program around the engine may have asked for faster ones
    (`torch.set_float32_matmul_precision`), for which processors with AMX take bfloat16: too coarse for a truth. The setting is
    that of the process, so meanwhile other threads have exact products, too."""
    given = torch.get_float32_matmul_precision()
    if given != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if given != "highest":
            torch.set_float32_matmul_precision(given)


def _cause(error: Exception) -> str:
    """What a model's code has needed that Inflight's parts do not have, if that is the error."""
    if isinstance(error, UnsupportedModelError):
        return str(error)
    needed = getattr(error, "obj", None)
    if isinstance(needed, PackedStates):
        return f"its layers need {error.name!r} of a cache of their own"  # type: ignore[attr-defined]
    if isinstance(needed, Adapter):
        return f"its code reads {error.name!r} of a linear layer itself, instead of calling the layer"  # type: ignore[attr-defined]
    return f"{type(error).__name__}: {error}"


def _check(model: TransformersForCausalLM, truth: Truth) -> None:
    device = model.device
    vocab_size = model.vocab_size
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, model.max_model_len) for length in NUM_TOKENS]
    if model.stage.is_first:  # the first tokens of a vocabulary may be special, like padding
        draw = partial(torch.randint, generator=generator, dtype=torch.int64, device="cpu")
        tokens, others = (draw(vocab_size // 2, vocab_size, (n,)) for n in lengths)
    else:  # hidden states
        draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        tokens, others = (draw(n, model.hidden_size).to(model.dtype) for n in lengths)
    tokens = tokens.to(device)
    others = others.to(device)
    last = torch.arange(model.max_model_len - len(others), model.max_model_len, dtype=torch.int64, device=device)
    exact = [each.float() if each.is_floating_point() else each for each in (tokens, others)]
    wanted = truth.run(exact[0], exact[1], last)
    _check_ends(model, tokens, wanted)
    model.set_decoder(wanted.decoder, wanted.output_class, wanted.first_position)
    counted = torch.arange(len(tokens), dtype=torch.int64, device=device)
    model.attention.record(partial(model.run_decoder, tokens, counted))
    if not model.attention.layers:
        raise UnsupportedModelError("its layers use neither transformers' attention functions nor its cache of states")
    states = model.attention.states
    # what may help, if a result differs
    remedies = [partial(truth.run_second, wanted, exact[1], last)]
    if states is not None:
        remedies.insert(0, partial(setattr, states, "token_by_token", True))
    while True:
        try:
            _compare(model, wanted, _run_in_chunks(model, tokens, others, wanted.layers))
            break
        except UnsupportedModelError:
            if not remedies:
                raise
            remedies.pop(0)()
    if model.stage.is_last and not model.makes_vectors:
        ours = model.compute_logits(wanted.hidden.to(model.dtype))
        sizes = _sizes(wanted.logits)
        _require_close(model, "the logits", ours, wanted.logits, sizes, wanted.logits, _tolerance(model))


def _check_ends(model: TransformersForCausalLM, tokens: Tensor, wanted: Result) -> None:
    """Checks what is before the first layer and after the last one.

    Raises:
        UnsupportedModelError: a stage cannot begin or end there, or the number of logits is not that of config.json.
    """
    if not model.stage.is_first and not torch.equal(wanted.layers[0].inputs[0].view(tokens.shape), tokens.float()):
        raise UnsupportedModelError(
            "it changes the hidden states before a layer, so it cannot be cut into pipeline stages"
        )
    if not model.stage.is_last:
        last = wanted.layers[-1].outputs[0]
        if not torch.equal(wanted.hidden.view(-1), last.view(-1)):
            raise UnsupportedModelError(
                "it changes the hidden states after a layer, so it cannot be cut into pipeline stages"
            )
    elif not model.makes_vectors and wanted.logits.shape[-1] != model.vocab_size:
        raise UnsupportedModelError(
            f"it has logits for {wanted.logits.shape[-1]} tokens, but config.json has vocab_size={model.vocab_size}; set "
            "the first with hf_overrides (--hf-overrides)"
        )


class _Ours(NamedTuple):
    """What the engine's model computed. Of each call of a layer: (input before it is replaced, output) of each sequence, and
    the decoder's result for the first sequence."""

    layers: list[list[tuple[Tensor, Tensor]]]
    hidden: Tensor


def _run_in_chunks(
    model: TransformersForCausalLM, tokens: Tensor, others: Tensor, layers: Sequence[LayerTruth]
) -> _Ours:
    backend = model.attention.backend
    offset = model.max_model_len - len(others)
    caches = list(model.attention.layers.values())
    specs = [layer.kv_cache_spec(_BLOCK_SIZE, model.dtype) for layer in caches]
    for i, (layer, spec) in enumerate(zip(caches, specs, strict=True)):
        arena = torch.zeros(5, spec.block_bytes, dtype=torch.uint8, device=tokens.device)
        layer.bind(backend.layer_cache(arena, spec, 0), i)
    sequences = (tokens, 0, [1, 2]), (others, offset, [3, 4])
    # both sequences may be so short that the last steps have no token
    cut = _steps if model.is_causal else _whole
    both = zip(cut(len(tokens)), cut(len(others)), strict=True)
    steps = [parts for parts in both if any(map(len, parts))]
    found: list[tuple[list[int], list[tuple[Tensor, Tensor]], Tensor]] = []
    for step in steps:
        taken = [(each, part) for each, part in zip(sequences, step, strict=True) if len(part)]
        attention = AttentionInputs(
            query_start_loc=np.cumsum([0, *(len(part) for _, part in taken)], dtype=np.int32),
            seq_lens=np.array([part.stop for _, part in taken], dtype=np.int32),
            num_computed_tokens=np.array([part.start for _, part in taken], dtype=np.int32),
            block_table=np.array([blocks for (_, _, blocks), _ in taken], dtype=np.int32),
        )
        inputs = torch.cat([each[part.start : part.stop] for (each, _, _), part in taken])
        positions = [start + i for (_, start, _), part in taken for i in part]
        with _watch(model, layers, step) as pairs:
            chunk = ModelStep(
                inputs,
                torch.tensor(positions, dtype=torch.int64, device=tokens.device),
                tuple(backend.metadata_builder(spec)(attention) for spec in specs),
                intermediate=None if model.stage.is_first else IntermediateTensors(inputs, inputs),
            )
            hidden = model(chunk)
        hidden = hidden if isinstance(hidden, Tensor) else hidden.delta
        found.append(([len(part) for part in step], pairs, hidden))
    for layer in caches:
        layer.bind(None, 0)
    joined = [
        [
            tuple(torch.cat([_part(pairs[i][side], sizes, n) for sizes, pairs, _ in found], dim=-2) for side in (0, 1))
            for n in (0, 1)
        ]
        for i in range(len(layers))
    ]
    return _Ours(joined, torch.cat([_part(hidden, sizes, 0) for sizes, _, hidden in found]))  # type: ignore[arg-type]


def _part(rows: Tensor, sizes: Sequence[int], number: int) -> Tensor:
    """The rows of one of the two sequences of a step."""
    return rows.narrow(-2, sum(sizes[:number]), sizes[number])


def _steps(length: int) -> list[range]:
    """The positions of a sequence that each step computes: three chunks, the second of which is one token, and then single
    tokens. A short sequence has empty chunks."""
    num_decodes = min(_NUM_DECODES, length // 2)
    prompt = length - num_decodes
    half = prompt // 2
    cuts = [0, half, min(half + 1, prompt), *range(prompt, length + 1)]
    cuts += [length] * (_NUM_DECODES - num_decodes)
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _whole(length: int) -> list[range]:
    """One step for all positions: tokens see those behind them."""
    return [range(length)]


@contextmanager
def _watch(
    model: TransformersForCausalLM, layers: Sequence[LayerTruth], step: Sequence[range]
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside, the inputs of the layers are replaced by those of the truth, and the experts by those that it chose. Gives the
    list to which (input before it is replaced, output) of each call of a layer are added."""
    found: list[tuple[Tensor, Tensor]] = []
    own: list[Tensor] = []
    num_tokens = sum(map(len, step))

    def cut(each: Tensor, part: range, dim: int) -> Tensor:
        return each.narrow(dim, part.start, len(part))

    # Any: as torch has it
    def before(
        _: int, __: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = hidden_of(arguments, keywords)
        own.append(hidden.clone())
        if len(found) == len(layers):
            raise UnsupportedModelError("it calls a decoder layer more often with a KV cache than without")
        truth = layers[len(found)]
        hidden = torch.cat([cut(each, part, -2) for each, part in zip(truth.inputs, step, strict=True)], dim=-2).to(
            hidden.dtype
        )
        known = [
            tuple(
                torch.cat([cut(each, part, 0) for each, part in zip(both, step, strict=True)])
                for both in zip(*calls, strict=True)
            )
            for calls in zip(*truth.routings, strict=False)
        ]
        open_routing.enter_context(ExpertRouting(num_tokens, known, _tolerance(model)))  # type: ignore[arg-type]
        return with_hidden(arguments, keywords, hidden)

    def after(_: int, __: nn.Module, ___: tuple[Any, ...], output: Any) -> None:
        open_routing.close()
        found.append((own.pop(), first(output).clone()))

    with ExitStack() as open_routing, hooked(model.decoder_layers, before, after):
        yield found
    if len(found) != len(layers):
        raise UnsupportedModelError("it calls its decoder layers less often with a KV cache than without")


def _compare(model: TransformersForCausalLM, wanted: Result, ours: _Ours) -> None:
    tolerance = base = _tolerance(model)  # of the layer before
    for i, (truth, own) in enumerate(zip(wanted.layers, ours.layers, strict=True)):
        for n, (given, output) in enumerate(own):
            start = truth.inputs[n]
            end = truth.outputs[n]
            name = "" if n == 0 else " of the sequence at the last positions"
            if i == 0 or n == 0:  # `Truth` gives the second sequence the output of the layer before
                of_input = f"the input of a decoder layer{name}"
                _require_close(model, of_input, given, start, _sizes(start), start, tolerance)
            has_update = start.shape == end.shape
            sizes = _sizes(end - start if has_update else end)
            rounded = torch.maximum(start.abs(), end.abs()) if has_update else end
            plain = _parts(model, truth.plain[n], end, sizes, rounded) if truth.plain else sizes.new_zeros(1)
            own_tolerance = max(base, min(_TIMES_PLAIN * float(plain.max()), _MOST))
            _require_close(model, f"decoder layer {i}{name}", output, end, sizes, rounded, own_tolerance)
            if n == 0:
                next_tolerance = own_tolerance
        tolerance = next_tolerance
    hidden = wanted.hidden
    name = "the hidden states after the last layer"
    _require_close(model, name, ours.hidden, hidden, _sizes(hidden), hidden, tolerance)


def _sizes(values: Tensor) -> Tensor:
    """[..., num_tokens, hidden_size] -> the size of each token's part [num_tokens]."""
    sizes: Tensor = values.transpose(-2, 0).flatten(1).norm(dim=1)
    return sizes


def _parts(model: TransformersForCausalLM, ours: Tensor, truth: Tensor, sizes: Tensor, rounded: Tensor) -> Tensor:
    """Each token's difference, as a part of `sizes` [num_tokens]. `rounded`: values that were rounded to the model's
    dtype; such a rounding is no difference."""
    allowed = torch.finfo(model.dtype).eps * rounded.abs()
    apart = (ours.float().reshape(truth.shape) - truth).abs() - allowed
    return _sizes(apart.clamp(min=0).nan_to_num(nan=torch.inf)) / sizes.clamp(min=1e-20)


def _require_close(
    model: TransformersForCausalLM,
    name: str,
    ours: Tensor,
    truth: Tensor,
    sizes: Tensor,
    rounded: Tensor,
    tolerance: float,
) -> None:
    """See `_parts`."""
    parts = _parts(model, ours, truth, sizes, rounded)
    largest = float(parts.max())
    logger.debug("%s: %.1e at most, median %.1e, allowed %.1e", name, largest, float(parts.median()), tolerance)
    if not largest <= tolerance:
        raise UnsupportedModelError(
            f"{name} differs from transformers' own by {largest:.1e} of its size at token {int(parts.argmax())}, in chunks and "
            "single tokens beside a sequence at the last positions" + _hint(model)
        )


def _tolerance(model: TransformersForCausalLM) -> float:
    if model.is_quantized:
        return _TOLERANCE_QUANTIZED
    return _TOLERANCE[model.dtype]


def _hint(model: TransformersForCausalLM) -> str:
    rope = str(getattr(model.lm.config.get_text_config(), "rope_parameters", None))
    if "longrope" in rope or "dynamic" in rope:
        return (
            "; its rotary embedding depends on the longest sequence of a batch: lower max_model_len to the length before it is "
            "scaled"
        )
    return ""
