"""`check`: compares a model on Inflight's KV cache with transformers' own eager attention, before the first request.

24 random tokens run through transformers alone. The same tokens run on a temporary KV cache in three chunks, each beside a
part of another sequence, whose positions are the last ones that a request may have. Each decoder layer gets the inputs that it
had in transformers, so that roundings do not add up, and a difference belongs to the layer in which it appears.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from inflight.attention.backend import AttentionInputs
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.errors import UnsupportedModelError
from inflight.models.transformers_fallback.build import attention_of

if TYPE_CHECKING:
    from inflight.models.transformers_fallback.model import TransformersForCausalLM

NUM_TOKENS = 24
_BLOCK_SIZE = 16
# Largest difference, as a part of the largest value. In less than float32 roundings may choose another expert for a token, so
# there a quarter of the tokens may differ.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
_WRONG_PART = {torch.float32: 0.0, torch.bfloat16: 0.25, torch.float16: 0.25}


def check(model: TransformersForCausalLM) -> None:
    """
    Raises:
        UnsupportedModelError: the model does not run, or a result differs. The message names the first layer that differs.
    """
    try:
        _check(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{model.name} cannot be computed by transformers on Inflight's KV cache: {error}"
        ) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError) as error:
        raise UnsupportedModelError(
            f"{model.name} cannot be computed by transformers on Inflight's KV cache: {type(error).__name__}: {error}"
        ) from error


def _check(model: TransformersForCausalLM) -> None:
    device, vocab_size = model.device, model.vocab_size
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(NUM_TOKENS, model.max_model_len)
    lengths = num_tokens, min(9, num_tokens)
    if model.stage.is_first:  # the first tokens of a vocabulary may be special, like padding
        draw = partial(torch.randint, generator=generator, dtype=torch.int64, device="cpu")
        tokens, others = (draw(vocab_size // 2, vocab_size, (n,)) for n in lengths)
    else:  # hidden states
        draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        tokens, others = (draw(n, model.hidden_size).to(model.dtype) for n in lengths)
    tokens, others = tokens.to(device), others.to(device)
    positions = torch.arange(num_tokens, dtype=torch.int64, device=device)
    inputs: list[Tensor] = []
    outputs: list[tuple[str, Tensor]] = []
    with attention_of(model.lm, "eager"):
        logits = model.find_decoder(tokens)
        with _watch(model.decoder_layers, outputs, inputs):
            out = model.run_decoder(tokens, None)
    if not inputs:
        raise UnsupportedModelError("its decoder layers were not found")
    for first in model.first_positions():
        model.first_position = first
        ours: list[Tensor] = []
        with _watch(model.decoder_layers, [], ours):
            model.attention.record(partial(model.run_decoder, tokens, positions))
        if torch.allclose(ours[0].float(), inputs[0].float(), rtol=0, atol=1e-3):
            break
    if not model.attention.layers:
        raise UnsupportedModelError("its layers use neither transformers' attention functions nor its cache of states")
    if "last_hidden_state" not in out:
        raise UnsupportedModelError("its decoder returns no last_hidden_state")
    if not model.stage.is_first and not torch.equal(inputs[0].view(tokens.shape), tokens):
        raise UnsupportedModelError(
            "it changes the hidden states before a layer, so it cannot be cut into pipeline stages"
        )
    if not model.stage.is_last:
        if not torch.equal(out["last_hidden_state"].view(-1), outputs[-1][1].view(-1)):
            raise UnsupportedModelError(
                "it changes the hidden states after a layer, so it cannot be cut into pipeline stages"
            )
    elif logits.shape[-1] != vocab_size:
        raise UnsupportedModelError(
            f"it has logits for {logits.shape[-1]} tokens, but config.json has vocab_size={vocab_size}; set the first with "
            "hf_overrides (--hf-overrides)"
        )
    outputs.append(("the hidden states after the last layer", out["last_hidden_state"][0]))
    model.set_output_class(type(out))
    try:
        _compare_all(outputs, _run_in_chunks(model, tokens, others, inputs))
    except UnsupportedModelError:
        if model.attention.states is None:
            raise
        model.attention.states.token_by_token = True
        _compare_all(outputs, _run_in_chunks(model, tokens, others, inputs))
    if model.stage.is_last:
        _compare("the logits", model.compute_logits(outputs[-1][1]), logits)


def _run_in_chunks(
    model: TransformersForCausalLM, tokens: Tensor, others: Tensor, inputs: list[Tensor]
) -> list[Tensor]:
    """Returns the output of each decoder layer, and the hidden states of the decoder, for the checked sequence."""
    backend, pieces = model.attention.backend, []
    layers = list(model.attention.layers.values())
    specs = [layer.kv_cache_spec(_BLOCK_SIZE, model.dtype) for layer in layers]
    for i, (layer, spec) in enumerate(zip(layers, specs, strict=True)):
        arena = torch.zeros(5, spec.block_bytes, dtype=torch.uint8, device=tokens.device)
        layer.bind(backend.layer_cache(arena, spec, 0), i)
    cuts, others_cuts = _cuts(len(tokens)), _cuts(len(others))
    offset = model.max_model_len - len(others)
    for start, stop, first, end in zip(cuts, cuts[1:], others_cuts, others_cuts[1:], strict=False):
        num_tokens = stop - start
        attention = AttentionInputs(
            query_start_loc=np.array([0, num_tokens, num_tokens + end - first], dtype=np.int32),
            seq_lens=np.array([stop, end], dtype=np.int32),
            num_computed_tokens=np.array([start, first], dtype=np.int32),
            block_table=np.array([[1, 2], [3, 4]], dtype=np.int32),
        )
        positions = [*range(start, stop), *range(offset + first, offset + end)]
        outputs: list[tuple[str, Tensor]] = []
        with _watch(model.decoder_layers, outputs, replaced=[each[..., start:stop, :] for each in inputs]):
            step = torch.cat((tokens[start:stop], others[first:end]))
            hidden = model(
                step,
                torch.tensor(positions, dtype=torch.int64, device=tokens.device),
                tuple(backend.layer_metadata(attention, spec) for spec in specs),
                intermediate=None if model.stage.is_first else IntermediateTensors(step, step),
            )
        hidden = hidden if isinstance(hidden, Tensor) else hidden.delta
        pieces.append([each[..., :num_tokens, :] for each in (*(output for _, output in outputs), hidden)])
    for layer in layers:
        layer.bind(None, 0)
    return [torch.cat(parts, dim=-2) for parts in zip(*pieces, strict=True)]


def _cuts(length: int) -> list[int]:
    """Where a sequence is cut into three chunks, the second of which is one token."""
    return [0, length // 3, length // 3 + 1, length]


@contextmanager
def _watch(
    layers: nn.ModuleList,
    outputs: list[tuple[str, Tensor]],
    inputs: list[Tensor] | None = None,
    replaced: Sequence[Tensor] = (),
) -> Iterator[None]:
    """Inside, the inputs and outputs of the layers are added to these lists, in the order of the calls. The first tokens of a
    layer's input are replaced by the next of `replaced`."""
    left = iter(replaced)

    def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:  # Any: as torch has it
        hidden: Tensor = arguments[0] if arguments else keywords["hidden_states"]
        if inputs is not None:
            inputs.append(hidden.clone())
        outputs.append(("the input of a decoder layer", hidden.clone()))
        if replaced:
            known = next(left)
            hidden = torch.cat((known, hidden[..., known.shape[-2] :, :]), dim=-2)
        return ((hidden, *arguments[1:]), keywords) if arguments else ((), {**keywords, "hidden_states": hidden})

    def after(name: str, _: nn.Module, __: Any, output: Any) -> None:
        outputs.append((name, (output[0] if isinstance(output, tuple) else output).clone()))

    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            for handle in (
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(partial(after, f"decoder layer {i}")),
            ):
                stack.callback(handle.remove)
        yield


def _compare_all(truths: list[tuple[str, Tensor]], results: list[Tensor]) -> None:
    for (name, truth), result in zip(truths, results, strict=True):
        _compare(name, result, truth)


def _compare(name: str, ours: Tensor, truth: Tensor) -> None:
    ours, theirs = ours.float(), truth.float().reshape(ours.shape)
    dtype = truth.dtype
    largest = theirs.abs().max().clamp(min=1e-6)
    wrong = (~((ours - theirs).abs() <= _TOLERANCE[dtype] * largest)).any(-1)
    if int(wrong.sum()) > len(wrong.flatten()) * _WRONG_PART[dtype]:
        raise UnsupportedModelError(
            f"{name} differs from transformers' eager attention by {(ours - theirs).abs().max() / largest:.1e} of its largest "
            "value, in chunks beside a sequence at the last positions; if its rotary embedding depends on the longest sequence "
            "of a batch, lower max_model_len to the length before it is scaled"
        )
