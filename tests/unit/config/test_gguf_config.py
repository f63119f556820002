"""A GGUF file's metadata -> what config.json says: the same architecture, and refusals that name the key."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inflight.config.gguf_config import read_model_config
from inflight.config.overrides import merge_overrides
from inflight.config.parse_architecture import parse_architecture
from inflight.config.unknown_family import describe_model
from inflight.errors import ConfigError, UnsupportedModelError
from tests.support.gguf_files import Number, floats, write_gguf
from tests.support.gguf_models import CONFIGS, metadata_of, write_pair


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_the_architecture_is_that_of_config_json(tmp_path: Path, architecture: str) -> None:
    plain, file = write_pair(tmp_path, architecture, {})
    truth = parse_architecture(read_model_config(plain))
    ours = parse_architecture(read_model_config(file))
    assert ours.rms_norm_eps == pytest.approx(truth.rms_norm_eps)  # float32 in the file
    assert ours.stream_eps == pytest.approx(truth.stream_eps)
    assert replace(ours, rms_norm_eps=truth.rms_norm_eps, stream_eps=truth.stream_eps) == truth


def test_phi_4_has_no_window(tmp_path: Path) -> None:
    """Its converter writes a window of 0 tokens."""
    _, file = write_pair(tmp_path, "phi3", {}, metadata={"phi3.attention.sliding_window": Number("I", 0)})
    assert {each.window for each in parse_architecture(read_model_config(file)).attentions} == {None}


def config_of(folder: Path, metadata: dict[str, Any], **tensors: torch.Tensor) -> dict[str, object]:
    values = {**metadata_of("llama", CONFIGS["llama"]), **metadata}
    stored = {
        "token_embd.weight": floats(torch.ones(203, 256)),
        **{name: floats(each) for name, each in tensors.items()},
    }
    return read_model_config(write_gguf(folder / "x.gguf", {k: v for k, v in values.items() if v is not None}, stored))


@pytest.mark.parametrize(
    ("metadata", "field", "value"),
    [
        ({"llama.attention.head_count_kv": Number("I", [2, 2])}, "num_key_value_heads", 2),
        (
            {"llama.attention.key_length": Number("I", 64), "llama.attention.value_length": Number("I", 64)},
            "head_dim",
            64,
        ),
        ({"split.count": Number("H", 1), "general.type": "model"}, "rope_scaling", None),
        ({"llama.attention.sliding_window": Number("I", 1024)}, "rope_scaling", None),  # no sequence outgrows it
        ({"llama.expert_count": Number("I", 0)}, "rope_scaling", None),
        ({"llama.rope.scaling.type": "none"}, "rope_scaling", None),
        ({"llama.rope.scale_linear": Number("f", 2)}, "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": Number("f", 4)},
            "rope_scaling",
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": Number("f", 4),
                "llama.rope.scaling.original_context_length": Number("I", 256),
            },
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        ({"tokenizer.ggml.eot_token_id": Number("I", 9)}, "eos_token_id", [2, 9]),
        ({"tokenizer.ggml.eot_token_id": Number("I", 2)}, "eos_token_id", [2]),
    ],
)
def test_a_field(tmp_path: Path, metadata: dict[str, Any], field: str, value: object) -> None:
    config = config_of(tmp_path, metadata)
    assert config[field] == value
    parse_architecture(config)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, ["general.architecture='mamba'", "llama, qwen2, qwen3"]),
        ({"general.architecture": None}, ["general.architecture=None"]),
        ({"general.architecture": "gemma-embedding"}, ["only the model's folder", "google/embeddinggemma-300m"]),
        ({"general.type": "adapter"}, ["is not a whole model: its general.type is 'adapter'"]),
        ({"general.type": "mmproj", "general.architecture": "clip"}, ["its general.type is 'mmproj'"]),
        ({"llama.expert_count": Number("I", 8)}, ["num_experts_per_tok is missing"]),
        ({"llama.attention.sliding_window": Number("I", 64)}, ["llama.attention.sliding_window=64"]),
        ({"llama.attention.causal": False}, ["llama.attention.causal=False"]),
        ({"llama.logit_scale": Number("f", 2)}, ["llama.logit_scale=2.0"]),
        ({"llama.feed_forward_length": Number("I", [256, 512])}, ["feed_forward_length is an array"]),
        ({"llama.embedding_length": ["x"]}, ["embedding_length is an array"]),
        ({"llama.embedding_length": None}, ["embedding_length=None"]),
        ({"llama.block_count": None}, ["num_hidden_layers is missing"]),
        ({"llama.block_count": Number("i", -1)}, ["num_hidden_layers=-1"]),
        ({"llama.context_length": "x"}, ["max_position_embeddings='x'"]),
        ({"llama.attention.value_length": Number("I", 32)}, ["value_length=32", "64"]),
        ({"llama.rope.dimension_count": Number("I", 32)}, ["rope.dimension_count=32", "64"]),
        ({"llama.rope.scaling.type": "longrope"}, ["longrope"]),
        ({"llama.rope.scaling.type": "linear"}, ["factor is missing"]),
        ({"llama.rope.scaling.attn_factor": Number("f", 2)}, ["rope.scaling.attn_factor=2.0"]),
        ({"tokenizer.ggml.eos_token_id": Number("i", -1)}, ["eos_token_id"]),
    ],
)
def test_a_refusal_names_the_key(tmp_path: Path, metadata: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse_architecture(config_of(tmp_path, metadata))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (
            {"llama.context_length": None},
            ["max_position_embeddings is missing", "llama.context_length", "--max-model-len"],
        ),
        ({"llama.block_count": None}, ["num_hidden_layers is missing", "llama.block_count", "--hf-overrides"]),
        ({"llama.feed_forward_length": None}, ["intermediate_size is missing", "llama.feed_forward_length"]),
        ({"llama.attention.head_count": Number("I", 3)}, ["num_attention_heads=3", "llama.attention.head_count"]),
    ],
)
def test_a_message_about_a_field_names_the_file_and_its_key(
    tmp_path: Path, metadata: dict[str, Any], words: list[str]
) -> None:
    key_length = {"llama.attention.key_length": Number("I", 64)}
    config = config_of(tmp_path, {**key_length, **metadata})
    with pytest.raises(UnsupportedModelError) as caught:
        describe_model(config, "auto", gguf=tmp_path / "x.gguf")
    for word in ("x.gguf: ", *words):
        assert word in str(caught.value)
    assert "config.json" not in str(caught.value)


def test_the_longest_sequence_can_be_given(tmp_path: Path) -> None:
    config_of(tmp_path, {"llama.context_length": None})
    path = tmp_path / "x.gguf"
    given = read_model_config(path, max_model_len=77)
    assert describe_model(given, "auto", gguf=path).max_position_embeddings == 77
    overridden = merge_overrides(read_model_config(path), {"max_position_embeddings": 78})
    assert describe_model(overridden, "auto", gguf=path).max_position_embeddings == 78
    config_of(tmp_path, {})  # the file's own counts
    assert read_model_config(path, max_model_len=77)["max_position_embeddings"] != 77


def llama3_divisors(factor: float, original: int = 8192) -> torch.Tensor:
    """By transformers: how much slower each pair turns than without scaling."""
    config = CONFIGS["llama"].__class__(**CONFIGS["llama"].to_dict())
    config.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)) / scaled


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_scaling_is_found_in_its_divisors(tmp_path: Path, factor: float) -> None:
    theta = {"llama.rope.freq_base": Number("f", 500000.0)}
    config = config_of(tmp_path, theta, **{"rope_freqs.weight": llama3_divisors(factor)})
    rope = parse_architecture(config).layers[0].mixer.rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.theta) == ("llama3", pytest.approx(factor), 500000.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings) == (1, 4, 8192)


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    assert config_of(tmp_path, {}, **{"rope_freqs.weight": torch.ones(32)})["rope_scaling"] is None


@pytest.mark.parametrize(
    "divisors",
    [
        llama3_divisors(8.0, original=4096),
        torch.linspace(1, 8, 32),
        torch.zeros(32),
        torch.full((32,), torch.nan),
        torch.full((32,), torch.inf),
        torch.ones(16),
        torch.ones(32, dtype=torch.float16),
    ],
)
def test_other_divisors_are_refused(tmp_path: Path, divisors: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        config_of(tmp_path, {"llama.rope.freq_base": Number("f", 500000.0)}, **{"rope_freqs.weight": divisors})


def test_a_mutated_header_is_one_config_error(tmp_path: Path) -> None:
    """Beyond the reader: whatever numbers are changed, a wrong model is refused as a `ConfigError`."""
    config_of(tmp_path, {})
    path = tmp_path / "x.gguf"
    data = path.read_bytes()
    random = np.random.default_rng(6)
    for _ in range(150):
        changed = bytearray(data)
        position = int(random.integers(24, 900))
        changed[position : position + 4] = random.bytes(4)
        path.write_bytes(bytes(changed))
        with suppress(ConfigError):
            parse_architecture(read_model_config(path))


def test_a_folder_has_its_config_json(tmp_path: Path) -> None:
    own = {"hidden_size": 8, "rope_scaling": {"type": "yarn", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert read_model_config(tmp_path) == own


@pytest.mark.parametrize(
    ("metadata", "field", "value"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": Number("f", 1)}, "rope_scaling", None),
        ({"llama.rope.scale_linear": Number("f", 1)}, "rope_scaling", None),
        ({"llama.attention.causal": True}, "rope_scaling", None),
        ({"llama.expert_used_count": Number("I", 0)}, "rope_scaling", None),
        ({"llama.attention.sliding_window": Number("I", 0)}, "rope_scaling", None),
        ({"tokenizer.ggml.eom_token_id": Number("I", 7)}, "eos_token_id", [2, 7]),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id", []),
        ({"llama.attention.key_length": None}, "head_dim", 64),
        ({"general.name": "x"}, "vocab_size", 203),
    ],
)
def test_keys_that_change_nothing_or_have_a_default(
    tmp_path: Path, metadata: dict[str, Any], field: str, value: object
) -> None:
    assert config_of(tmp_path, metadata)[field] == value


@pytest.mark.parametrize(
    "metadata", [{"llama.expert_used_count": Number("I", 2)}, {"llama.attention.sliding_window": Number("I", 1023)}]
)
def test_keys_that_would_change_the_result(tmp_path: Path, metadata: dict[str, Any]) -> None:
    (key,) = metadata
    with pytest.raises(UnsupportedModelError, match=f"{key}="):
        config_of(tmp_path, metadata)


def test_what_tensors_say(tmp_path: Path) -> None:
    names = ("tie_word_embeddings", "attention_bias", "mlp_bias", "dtype")
    cases: list[tuple[dict[str, torch.Tensor], tuple[bool, bool, bool, str]]] = [
        ({}, (True, False, False, "bfloat16")),
        ({"output.weight": torch.ones(5, 4)}, (False, False, False, "bfloat16")),
        ({"blk.0.attn_q.bias": torch.ones(4), "blk.0.attn_q.weight": torch.ones(2, 4)}, (True, True, False, "float32")),
        ({"blk.0.ffn_down.bias": torch.ones(4)}, (True, False, True, "bfloat16")),
        ({"blk.0.ffn_down.weight": torch.ones(2, 4, dtype=torch.float16)}, (True, False, False, "float16")),
        ({"blk.0.attn_q.weight": torch.ones(2, 4, dtype=torch.bfloat16)}, (True, False, False, "bfloat16")),
    ]
    for tensors, expected in cases:
        config = config_of(tmp_path, {}, **{"token_embd.weight": torch.ones(5, 4)}, **tensors)
        assert tuple(config[name] for name in names) == expected
