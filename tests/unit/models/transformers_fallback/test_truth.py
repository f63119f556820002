"""`Truth`: it computes what transformers computes, layer by layer, with the weights that the engine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from transformers import LlamaForCausalLM, PreTrainedConfig, RobertaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from inflight.config.engine import QuantizationConfig
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import UnsupportedModelError
from inflight.kernels.quantized_weight import quantize_rows
from inflight.models.transformers_fallback.truth import Truth, accepted, first, hidden_of, hooked, named, with_hidden
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model
from tests.unit.models.transformers_fallback.fallback_models import load, write

TOKENS, OTHERS, POSITIONS = torch.arange(40, 52), torch.arange(9, 16), torch.arange(57, 64)


class Failing(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        raise ValueError("bad luck")


def test_a_layer_that_fails_leaves_no_function_mode_open() -> None:
    """It would note the choices of all later code in this thread."""
    truth: Any = object.__new__(Truth)
    truth._layers, truth._units, truth._dtype = nn.ModuleList([Failing()]), [("", None)], torch.float32
    truth._fill = lambda unit: None
    with pytest.raises(ValueError, match="bad luck"), truth._with_layers([], None):
        truth._layers[0](torch.zeros(1, 3, 8))
    assert _get_current_function_mode_stack() == []
    assert not truth._layers[0]._forward_hooks and not truth._layers[0]._forward_pre_hooks


@pytest.fixture
def make_truth(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Truth]:
    """As `load` makes it."""

    def make(folder: Path, **fields: Any) -> Truth:
        made: list[Callable[[], Truth]] = []
        module = "inflight.models.transformers_fallback.model"
        monkeypatch.setattr(f"{module}.check", lambda model, make_truth: made.append(make_truth))
        load(folder, **fields)
        return made[0]()

    return make


class Watched:
    """What the layers of transformers' own model get and return, for one sequence."""

    def __init__(self, model: Any, tokens: Tensor, positions: Tensor | None = None) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

        def before(_: int, __: nn.Module, arguments: Any, keywords: Any) -> Any:
            self.inputs.append(hidden_of(arguments, keywords).clone())
            return arguments, keywords

        layers = model.get_decoder().layers
        with torch.no_grad(), hooked(layers, before, lambda *given: self.outputs.append(first(given[-1]).clone())):
            decoded = model.get_decoder()(tokens[None], position_ids=None if positions is None else positions[None])
            self.hidden = decoded.last_hidden_state[0]
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        with torch.no_grad():
            self.logits = model(tokens[None]).logits[0]


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-4) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in pairs
    )


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
@torch.no_grad()
def test_all_that_transformers_computes(tmp_path: Path, make_truth: Callable[..., Truth], family: str) -> None:
    folder, theirs = write(tmp_path, family)
    truth = make_truth(folder)
    result = truth.run(TOKENS, OTHERS, POSITIONS)
    wanted = [Watched(theirs, TOKENS), Watched(theirs, OTHERS, POSITIONS)]
    for _ in range(2):
        assert (result.decoder, result.first_position) == ("model", 0)
        assert result.output_class is type(theirs.get_decoder()(TOKENS[None]))
        assert close([result.hidden, result.logits], [wanted[0].hidden, wanted[0].logits])
        for number, own in enumerate(wanted):
            assert close([layer.inputs[number] for layer in result.layers], own.inputs)
            assert close([layer.outputs[number] for layer in result.layers], own.outputs)
        for layer in result.layers:
            assert not layer.plain
            sizes = [[(tuple(scores.shape), tuple(chosen.shape)) for scores, chosen in each] for each in layer.routings]
            assert sizes == ([[((12, 4), (12, 2))], [((7, 4), (7, 2))]] if family == "qwen3_moe" else [[], []])
        for layer in result.layers:  # they are put there once more
            layer.inputs[1] = layer.outputs[1] = torch.zeros(1)
            layer.routings[1] = [(torch.zeros(1), torch.zeros(1))] * 5
        truth.run_second(result, OTHERS, POSITIONS)
    weights = dict(truth.lm.named_parameters())
    assert all(each.is_meta == (".layers." in name) for name, each in weights.items()), "a layer keeps its memory"


@torch.no_grad()
def test_in_bfloat16_the_layers_also_run_in_this_dtype(tmp_path: Path, make_truth: Callable[..., Truth]) -> None:
    """Weights and inputs are rounded as those of the engine, but the truth computes in float32."""
    folder, theirs = write(tmp_path, "gemma2")
    rounded = theirs.bfloat16().float()  # this changes `theirs`, too
    truth = make_truth(folder, dtype="bfloat16")
    result = truth.run(TOKENS, OTHERS, POSITIONS)
    for _ in range(2):
        for layer in result.layers:
            assert len(layer.plain) == len(layer.outputs) == 2
            for given, output, plain in zip(layer.inputs, layer.outputs, layer.plain, strict=True):
                assert given.equal(given.bfloat16().float()) and output.dtype == plain.dtype == torch.float32
                assert not close([plain], [output], 1e-5) and float((plain - output).norm() / output.norm()) < 0.02
                assert not output.equal(output.bfloat16().float()) and plain.equal(plain.bfloat16().float())
        assert close([result.layers[0].outputs[0]], [Watched(rounded, TOKENS).outputs[0]], 0.05)
        for layer in result.layers:
            layer.plain[1] = torch.zeros(1)
        truth.run_second(result, OTHERS, POSITIONS)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "quantization", [QuantizationConfig(layers="int8"), QuantizationConfig(layers="int4", head="int8", group_size=32)]
)
@torch.no_grad()
def test_weights_are_rounded_as_the_engine_rounds_them(
    tmp_path: Path, make_truth: Callable[..., Truth], quantization: QuantizationConfig, num_ranks: int
) -> None:
    """A rank quantizes its own part of a row, with a scale of its own."""
    folder, theirs = write(tmp_path, FAMILY_CONFIGS["qwen3"][0])
    truth = make_truth(folder, quantization=quantization, tp=TensorParallelGroup(num_ranks, 0))
    found: dict[str, Tensor] = {}

    def keep(_: nn.Module, __: object, ___: object) -> None:
        found.update({name: each.data.clone() for name, each in truth.lm.named_parameters() if not each.is_meta})

    for layer in truth.lm.get_decoder().layers:
        layer.register_forward_hook(keep, prepend=True)
    truth.run(TOKENS, OTHERS, POSITIONS)
    bits = 8 if quantization.layers == "int8" else 4
    assert len(found) == len(list(theirs.named_parameters()))
    for name, weight in theirs.named_parameters():
        if name == "lm_head.weight":
            kind, num_parts = (8 if quantization.head else None), 1
        else:
            kind, num_parts = (
                (bits if "proj" in name else None),
                (num_ranks if "o_proj" in name or "down" in name else 1),
            )
        wanted = weight.data
        if kind is not None:
            # 112 input features are no multiple of 32: then each row has one scale, and 8 bits
            fits = kind == 4 and wanted.shape[1] // num_parts % 32 == 0
            parts = [each.contiguous() for each in wanted.chunk(num_parts, 1)]
            rounded = [quantize_rows(each, bits=4 if fits else 8, group_size=32 * fits).dequantize() for each in parts]
            wanted = torch.cat(rounded, 1)
            assert not wanted.equal(weight.data)
        assert close([found[name]], [wanted], 1e-6), name


@torch.no_grad()
def test_some_families_count_positions_from_the_one_after_padding(
    tmp_path: Path, make_truth: Callable[..., Truth]
) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = RobertaConfig(**sizes, intermediate_size=32, is_decoder=True, max_position_embeddings=70, pad_token_id=4)
    folder, _ = write(tmp_path, config)
    assert make_truth(folder).run(TOKENS, OTHERS, POSITIONS).first_position == 5
    padded: PreTrainedConfig = FAMILY_CONFIGS["llama"][0].__class__(
        **{**FAMILY_CONFIGS["llama"][0].to_dict(), "pad_token_id": 4}
    )
    folder = write_model(padded, tmp_path / "padded", seed=0)
    assert make_truth(folder).run(TOKENS, OTHERS, POSITIONS).first_position == 0


@torch.no_grad()
def test_a_model_whose_decoder_cannot_be_watched_is_refused(
    tmp_path: Path, make_truth: Callable[..., Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=0)
    truth = make_truth(folder)
    forward = LlamaModel.forward

    def as_tuple(self: Any, *arguments: Any, **more: Any) -> Any:
        return forward(self, *arguments, **more).to_tuple()

    def without_layers(self: Any, *_: Any, **__: Any) -> Any:
        return self.norm(torch.zeros(1, 5, 64))

    def of_itself(self: Any, input_ids: Tensor, **_: Any) -> Any:
        return self.lm_head(self.model.embed_tokens(input_ids))

    def head(self: Any, input_ids: Tensor, **_: Any) -> Any:
        return {"logits": self.lm_head(self.model(input_ids)[0])}

    for owner, changed, message in (
        (LlamaModel, as_tuple, "its decoder returns no last_hidden_state"),
        (LlamaModel, without_layers, "its decoder layers were not found"),
        (LlamaForCausalLM, of_itself, "it has no decoder apart from its head"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(LlamaForCausalLM, "forward", head)
            patch.setattr(owner, "forward", changed)
            with pytest.raises(UnsupportedModelError, match=message):
                truth.run(TOKENS, OTHERS, POSITIONS)
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in truth.lm.modules())
        assert not any("forward" in vars(layer) for layer in truth.lm.get_decoder().layers)
    assert len(truth.run(TOKENS, OTHERS, POSITIONS).layers) == 2


@pytest.mark.parametrize("shape", [lambda x: (x,), lambda x: (x, None), lambda x: (x, None, None), lambda x: [x, None]])
@torch.no_grad()
def test_layers_may_return_hidden_states_among_other_things(
    tmp_path: Path, make_truth: Callable[..., Truth], monkeypatch: pytest.MonkeyPatch, shape: Callable[[Tensor], Any]
) -> None:
    """The decoder takes them apart as its layers return them."""
    folder, theirs = write(tmp_path, FAMILY_CONFIGS["llama"][0])
    wanted = Watched(theirs, TOKENS)
    forward, call, length = LlamaDecoderLayer.forward, nn.Module.__call__, len(shape(TOKENS))

    def taken_apart(self: nn.Module, *arguments: Any, **more: Any) -> Any:
        found = call(self, *arguments, **more)
        if not isinstance(self, LlamaDecoderLayer):
            return found
        if isinstance(found, Tensor) or len(found) != length:
            raise ValueError("not as the decoder wants it")
        return found[0]

    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda *given, **more: shape(forward(*given, **more)))
    monkeypatch.setattr(LlamaDecoderLayer, "__call__", taken_apart)
    result = make_truth(folder).run(TOKENS, OTHERS, POSITIONS)
    assert close([layer.outputs[0] for layer in result.layers], wanted.outputs)


def test_arguments_of_models_and_layers() -> None:
    hidden, other = torch.zeros(1, 3, 8), torch.ones(1, 3, 8)
    assert named(torch.arange(3, dtype=torch.int32))["input_ids"].tolist() == [[0, 1, 2]]
    assert named(torch.arange(3, dtype=torch.int32))["input_ids"].dtype == torch.int64
    assert named(hidden[0])["inputs_embeds"].shape == (1, 3, 8)
    assert (
        hidden_of((hidden, 5), {"hidden_states": other}) is hidden and hidden_of((), {"hidden_states": other}) is other
    )
    assert with_hidden((hidden, 5), {"a": 1}, other) == ((other, 5), {"a": 1})
    assert with_hidden((), {"hidden_states": hidden, "a": 1}, other) == ((), {"hidden_states": other, "a": 1})
    assert first((hidden, None)) is first([hidden]) is first(hidden) is hidden

    def closed(input_ids: Tensor, position: int = 0) -> None: ...

    def open_ended(input_ids: Tensor, **more: object) -> None: ...

    models: list[Any] = [SimpleNamespace(forward=closed), SimpleNamespace(forward=open_ended)]
    assert accepted(models[0]) == {"input_ids", "position"}
    assert accepted(models[1]) == {"input_ids", "more", "position_ids"}
