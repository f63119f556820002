"""Which EAGLE heads are read, and for which served model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inflight.config.architecture import ModelArchitecture
from inflight.config.eagle import describe_eagle, kind_of_head, read_targets
from inflight.config.parse_architecture import parse_architecture
from inflight.errors import CheckpointError, ConfigError, UnsupportedModelError

AFTER = "eagle_aux_hidden_state_layer_ids"
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
HEAD = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20}


def served(num_layers: int = 12) -> ModelArchitecture:
    return parse_architecture({**SIZES, "num_hidden_layers": num_layers})


def describe(
    config: dict[str, Any], method: str = "eagle3", *, num_layers: int = 12, folder: Path | None = None
) -> ModelArchitecture:
    return describe_eagle(config, folder or Path("/head"), served(num_layers), method, is_dummy=folder is None)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (2, 6, 9)),
        ({AFTER: [0, 11, 4]}, (0, 4, 11)),
        ({"eagle_config": {AFTER: [1, 5, 8]}}, (2, 6, 9)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 6, 9)),
    ],
)
def test_layers_of_the_served_model(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    spec = describe({**HEAD, **fields}).hidden_inputs
    assert spec is not None
    assert (spec.captured, spec.captured_size, spec.head_size) == (layers, 96, 20)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (HEAD, "eagle3"),
        ({**HEAD, "architectures": ["LlamaForCausalLM"]}, "eagle3"),
        ({**SIZES, "architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        (SIZES, "eagle"),
        ({"model_type": "eagle", "model": SIZES, "architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["Eagle3Speculator"], "transformer_layer_config": SIZES, "draft_vocab_size": 9}, "eagle3"),
    ],
)
def test_kinds(config: dict[str, Any], kind: str) -> None:
    other = "eagle" if kind == "eagle3" else "eagle3"
    assert describe(config, kind).num_layers == 1
    with pytest.raises(ConfigError, match=f"method='{other}', but .* give method='{kind}'"):
        describe(config, other)


def test_whole_models_are_no_heads() -> None:
    assert kind_of_head(["LlamaForCausalLM"]) is None
    assert kind_of_head(["Eagle3DraftModel"]) == "eagle3"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**HEAD, "vocab_size": 51}, ("another vocabulary", "vocab_size=51", "has 50")),
        ({**SIZES, "hidden_size": 64}, ("another hidden size", "hidden_size=64", "has 32")),
        ({**HEAD, AFTER: [3, 12, 5]}, ("[3, 5, 12]", "the layers 0 to 11")),
        ({**HEAD, "eagle_config": {AFTER: [3, 11]}}, ("[4, 12]", "the layers 0 to 11")),
        ({**HEAD, AFTER: [3, 3]}, ("each can be read once",)),
        ({**HEAD, "architectures": ["EagleMistralForCausalLM"]}, ("no EAGLE head that Inflight knows",)),
    ],
)
def test_heads_for_other_models(config: dict[str, Any], words: tuple[str, ...]) -> None:
    method = "eagle" if "draft_vocab_size" not in config else "eagle3"
    with pytest.raises(ConfigError) as error:
        describe(config, method)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 2},
        {"norm_before_fc": True},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {AFTER: "all"},
    ],
)
def test_variants_that_are_not_computed(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"not supported|not a list"):
        describe({**HEAD, **fields})


def tensors(**others: torch.Tensor) -> dict[str, torch.Tensor]:
    names = ("input_layernorm", "hidden_norm", "mlp.up_proj")
    found = {f"midlayer.{name}.weight": torch.ones(32) for name in names}
    found |= {"norm.weight": torch.ones(32), "fc.weight": torch.ones(32, 96), "lm_head.weight": torch.ones(20, 32)}
    return found | {"d2t": torch.arange(20)} | others


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"fc.weight": torch.ones(32, 120)}, ("another hidden size", "[32, 120]", "[32, 96]")),
        ({"d2t": torch.arange(19)}, ("another vocabulary", "20 tokens, but d2t has 19")),
    ],
)
def test_weights_for_other_models(others: dict[str, torch.Tensor], words: tuple[str, ...], tmp_path: Path) -> None:
    save_file(tensors(**others), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        describe(HEAD, folder=tmp_path)
    for word in words:
        assert word in str(error.value)


def test_what_the_files_have(tmp_path: Path) -> None:
    save_file(tensors(**{"fc.bias": torch.ones(32)}), tmp_path / "model.safetensors")
    spec = describe({**HEAD, "norm_before_residual": True}, folder=tmp_path).hidden_inputs
    assert spec is not None
    assert (spec.has_bias, spec.has_embedding, spec.norm_replaces, spec.head_size) == (True, False, True, 20)
    missing = tensors()
    del missing["norm.weight"]
    save_file(missing, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model.norm"):
        describe(HEAD, folder=tmp_path)
    missing = tensors()
    del missing["lm_head.weight"]
    save_file(missing, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has d2t, the tokens of its lm_head, but no lm_head.weight"):
        describe(HEAD, folder=tmp_path)


def test_tokens_that_a_head_knows(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    targets = read_targets(tmp_path, 50)
    assert targets is not None and np.array_equal(targets, np.arange(0, 40, 2))
    for wrong in (torch.full((20,), 31), -torch.arange(20)):
        save_file(tensors(d2t=wrong), tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="the tokens 0 to 49, each once"):
            read_targets(tmp_path, 50)
    without = tensors()
    del without["d2t"]
    save_file(without, tmp_path / "model.safetensors")
    assert read_targets(tmp_path, 50) is None
