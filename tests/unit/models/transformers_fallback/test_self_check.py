"""`check`: a model that is computed wrongly on the caches does not start, and the message names what differs first."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GraniteConfig, MiniMaxConfig, Phi3Config, PreTrainedConfig, RwkvConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from inflight.config.engine import QuantizationConfig
from inflight.config.pipeline_stage import pipeline_stage
from inflight.errors import UnsupportedModelError
from inflight.models.transformers_fallback.adapters import HeadAdapter
from inflight.models.transformers_fallback.model import TransformersForCausalLM
from tests.support.model_zoo import FALLBACK_CONFIGS, FAMILY_CONFIGS, VOCAB_SIZE, write_model
from tests.unit.models.transformers_fallback.fallback_models import load, model_config

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
INT8 = QuantizationConfig(layers="int8", head="int8")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["llama"][0], tmp_path_factory.mktemp("llama") / "model", seed=0)


Change = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # layer, its input, its update, positions -> the update


@pytest.fixture
def change_layers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    def patch(change: Change) -> None:
        forward = LlamaDecoderLayer.forward

        def changed(self: Any, hidden_states: Tensor, *arguments: Any, position_ids: Any = None, **more: Any) -> Tensor:
            result: Tensor = forward(self, hidden_states, *arguments, position_ids=position_ids, **more)
            return hidden_states + change(self, hidden_states, result - hidden_states, position_ids)

        monkeypatch.setattr(LlamaDecoderLayer, "forward", changed)

    return patch


def is_ours(module: Any) -> bool:
    """Whether a layer or a decoder belongs to the engine's model, not to the truth."""
    config = module.config if hasattr(module, "config") else module.self_attn.config
    return bool(config._attn_implementation == "inflight")


def of_layer(number: int, share: float) -> Change:
    """The engine's layer differs from the truth by this part of its update."""

    def change(layer: Any, _: Tensor, update: Tensor, __: Tensor) -> Tensor:
        return update * (1 + share * (is_ours(layer) and layer.self_attn.layer_idx == number))

    return change


def mixed(layer: Any, hidden: Tensor, update: Tensor, positions: Tensor) -> Tensor:
    """Each token sees the one before it in the row, which may be another sequence's."""
    return update + hidden.roll(1, 1)


def mixed_late(layer: Any, hidden: Tensor, update: Tensor, positions: Tensor) -> Tensor:
    return update + hidden.roll(1, 1) * (positions > 50)[..., None]


def wrong_at_token_7(layer: Any, hidden: Tensor, update: Tensor, positions: Tensor) -> Tensor:
    return update * (1 + 0.5 * is_ours(layer) * (positions == 7))[..., None]


def not_a_number(layer: Any, hidden: Tensor, update: Tensor, positions: Tensor) -> Tensor:
    return update.masked_fill((positions == 3)[..., None], torch.nan) if is_ours(layer) else update


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mixed, r"^decoder layer 0 differs from transformers' own"),
        (mixed_late, r"^decoder layer 0 of the sequence at the last positions differs"),
        (of_layer(1, 0.03), r"^decoder layer 1 differs .* by 3.0e-02 of its size at token "),
        (wrong_at_token_7, r"^decoder layer 0 differs .* by 5.0e-01 of its size at token 7, "),
        (not_a_number, r"^decoder layer 0 differs .* by inf of its size at token 3, "),
    ],
)
def test_the_first_layer_that_differs_is_named(
    llama: Path, change_layers: Callable[[Change], None], change: Change, message: str
) -> None:
    change_layers(change)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be computed") as refusal:
        load(llama)
    _, _, cause = str(refusal.value).partition("on Inflight's KV cache: ")
    assert re.search(message, cause), cause
    assert "max_model_len" not in cause  # only a remedy for some rotary embeddings


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        ({}, 1e-4, 4e-4),
        ({"dtype": "float16"}, 0.006, 0.02),
        ({"dtype": "bfloat16"}, 0.03, 0.08),
        ({"quantization": INT8}, 0.06, 0.15),
    ],
    ids=str,
)
def test_how_much_may_differ(
    llama: Path, change_layers: Callable[[Change], None], fields: dict[str, Any], allowed: float, refused: float
) -> None:
    def change(layer: Any, _: Tensor, update: Tensor, __: Tensor) -> Tensor:
        return update * (1 + is_ours(layer) * (refused if layer.self_attn.layer_idx else allowed))

    change_layers(change)
    with pytest.raises(UnsupportedModelError, match="decoder layer 1 differs"):
        load(llama, **fields)


@pytest.mark.parametrize("shares", [[(0.12, 0.2), (0.12, 0.28)], [(0.25, 0.27), (0.4, 0.4)]])
def test_a_layer_may_enlarge_roundings_as_much_as_with_transformers_alone(
    llama: Path, change_layers: Callable[[Change], None], shares: list[tuple[float, float]]
) -> None:
    """Up to twice as much, and up to a limit. `shares`: of each layer, without the caches and with them."""

    def change(layer: Any, hidden: Tensor, update: Tensor, positions: Tensor) -> Tensor:
        share = shares[int(layer.self_attn.layer_idx)][is_ours(layer)]
        return update * (1 + share * (hidden.dtype == torch.bfloat16))

    change_layers(change)
    with pytest.raises(UnsupportedModelError, match="decoder layer 1 differs"):
        load(llama, dtype="bfloat16")


def change_decoder(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    """`change(decoder, result)` after each run of the engine's decoder."""
    forward = LlamaModel.forward

    def changed(self: Any, *arguments: Any, **more: Any) -> Any:
        result = forward(self, *arguments, **more)
        if is_ours(self):
            change(self, result)
        return result

    monkeypatch.setattr(LlamaModel, "forward", changed)


def test_the_end_of_the_decoder_and_its_head_are_compared(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(_: Any, result: Any) -> None:
        result.last_hidden_state = result.last_hidden_state * 1.001

    with monkeypatch.context() as patch:
        change_decoder(patch, scale)
        with pytest.raises(UnsupportedModelError, match=r"after the last layer .* 1.0e-03"):
            load(llama)
    forward = HeadAdapter.forward
    monkeypatch.setattr(HeadAdapter, "forward", lambda self, x: forward(self, x) * 1.001)
    with pytest.raises(UnsupportedModelError, match=r"the logits differs .* 1.0e-03"):
        load(llama)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda positions: positions + 1, "the input of a decoder layer differs"),
        (
            lambda positions: positions.clamp(max=40),
            "the input of a decoder layer of the sequence at the last positions differs",
        ),
    ],
)
def test_positions_that_are_wrong_before_the_first_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor], message: str
) -> None:
    run = TransformersForCausalLM.run_decoder
    monkeypatch.setattr(
        TransformersForCausalLM, "run_decoder", lambda self, inputs, positions: run(self, inputs, change(positions))
    )
    with pytest.raises(UnsupportedModelError, match=message):
        load(write_model(FALLBACK_CONFIGS["gpt2"][0], tmp_path / "model", seed=0))


@pytest.mark.parametrize(("numbers", "message"), [([0, 1, 1], "more often"), ([0], "less often")])
def test_layers_are_called_as_often_as_without_a_cache(
    llama: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[int], message: str
) -> None:
    forward = LlamaModel.forward

    def changed(self: Any, *arguments: Any, **more: Any) -> Any:
        if is_ours(self):
            self.layers = nn.ModuleList([self.layers[number] for number in numbers])
            self.config.num_hidden_layers = len(numbers)
        return forward(self, *arguments, **more)

    monkeypatch.setattr(LlamaModel, "forward", changed)
    with pytest.raises(UnsupportedModelError, match=f"{message} with a KV cache than without"):
        load(llama)


def test_a_decoder_without_attention_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda self, hidden, **_: hidden + self.mlp(hidden))
    with pytest.raises(UnsupportedModelError, match="attention functions nor its cache"):
        load(llama)


def test_the_vocabulary_is_that_of_the_configuration(llama: Path) -> None:
    architecture = replace(model_config(llama).architecture, vocab_size=200)
    with pytest.raises(UnsupportedModelError, match=r"203 tokens, .*vocab_size=200"):
        load(llama, architecture=architecture)


def test_errors_of_a_models_code_are_told_with_the_reason_for_transformers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("bad luck")

    change_decoder(monkeypatch, fail)
    architecture = replace(model_config(llama).architecture, not_native="it has gills")
    with pytest.raises(UnsupportedModelError, match=r"ValueError: bad luck\. .*: it has gills"):
        load(llama, architecture=architecture)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MiniMaxConfig(**SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=2, intermediate_size=32),
            "its layers need 'get_linear_cache' of a cache of their own",
        ),
        (
            RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, context_length=128),
            "its code reads 'weight' of a linear layer itself",
        ),
        (
            Phi3Config(
                **SMALL,
                intermediate_size=96,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [3.0] * 8,
                    "original_max_position_embeddings": 32,
                },
                original_max_position_embeddings=32,
                max_position_embeddings=1024,
            ),
            "lower max_model_len to the length before it is scaled",
        ),
    ],
    ids=["states", "weights", "longrope"],
)
def test_what_a_model_needs_is_told(tmp_path: Path, config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load(write_model(config, tmp_path / "model", seed=0))


def test_stages_that_would_change_the_hidden_states_between_layers_are_refused(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    granite = deepcopy(FAMILY_CONFIGS["granite"][1])  # it scales the embeddings, and would scale them in each stage
    assert isinstance(granite, GraniteConfig)
    folder = write_model(granite, tmp_path / "model", seed=0)
    load(folder, stage=pipeline_stage((1, 1), 0))
    with pytest.raises(UnsupportedModelError, match="hidden states before a layer"):
        load(folder, stage=pipeline_stage((1, 1), 1))
    forward = LlamaModel.forward

    def doubled(self: nn.Module, *arguments: Any, **more: Any) -> Any:
        result = forward(self, *arguments, **more)
        result.last_hidden_state = 2 * result.last_hidden_state
        return result

    monkeypatch.setattr(LlamaModel, "forward", doubled)
    load(llama, stage=pipeline_stage((1, 1), 1))
    with pytest.raises(UnsupportedModelError, match="hidden states after a layer"):
        load(llama, stage=pipeline_stage((1, 1), 0))


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 9, 10, 20])
def test_sequences_may_be_shorter_than_those_of_the_check(llama: Path, max_model_len: int) -> None:
    load(llama, max_model_len=max_model_len)


@pytest.mark.parametrize(("family", "token_by_token"), [("falcon_mamba", True), ("olmo_hybrid", False)])
def test_tokens_run_one_by_one_only_in_models_that_ignore_the_state_of_several_tokens(
    tmp_path: Path, family: str, token_by_token: bool
) -> None:
    config = deepcopy(FALLBACK_CONFIGS[family][0])
    model = load(write_model(config, tmp_path / "model", seed=0))
    assert model.attention.states is not None and model.attention.states.token_by_token == token_by_token


def test_layers_may_read_what_other_layers_have_computed(tmp_path: Path) -> None:
    """The last layers of a Gemma 4 read the keys and values of earlier ones."""
    load(write_model(FAMILY_CONFIGS["gemma4"][0], tmp_path / "model", seed=0))
