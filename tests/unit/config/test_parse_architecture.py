"""config.json -> ModelArchitecture: defaults, both spellings of transformers, and refusals that name the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.mixers import HEAD, AttentionSpec, RopeConfig
from inflight.config.parse_architecture import SUPPORTED_ARCHITECTURES, is_known_family, parse_architecture
from inflight.errors import UnsupportedModelError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def parse(**fields: Any) -> ModelArchitecture:
    return parse_architecture({**BASE, **fields})


def family(name: str, **fields: Any) -> ModelArchitecture:
    return parse(architectures=[f"{name}ForCausalLM"], **fields)


def refusal(**fields: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        parse(**fields)
    return str(caught.value)


def test_a_plain_llama() -> None:
    assert parse(torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, use_cache=True) == ModelArchitecture(
        name="LlamaForCausalLM",
        vocab_size=200,
        hidden_size=64,
        layers=(
            LayerSpec(
                mixer=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(theta=10000.0)),
                mlp=GatedMlpSpec(size=128),
            ),
        )
        * 4,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        dtype="bfloat16",
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"eos_token_id": [7, 9]}, "eos_token_ids", (7, 9)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"head_dim": 20}, "layers.0.mixer.head_dim", 20),
        ({"head_dim": None}, "layers.0.mixer.head_dim", 16),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "dtype", "bfloat16"),
        ({"dtype": "bf16"}, "dtype", "bfloat16"),
        ({"dtype": "fp16"}, "dtype", "float16"),
        ({"dtype": "auto"}, "dtype", "float32"),
        ({"dtype": "float64"}, "dtype", "float32"),
        ({"eos_token_id": -1}, "eos_token_ids", ()),
        ({"architectures": "MistralForCausalLM"}, "name", "MistralForCausalLM"),
        ({"num_key_value_heads": None}, "layers.0.mixer.num_kv_heads", 4),
        ({"mlp_bias": True}, "layers.0.mlp.bias", True),
        ({"sliding_window": 9}, "layers.0.mixer.window", None),  # transformers' Llama does not read it
    ],
)
def test_a_field(fields: dict[str, Any], attribute: str, value: object) -> None:
    found: Any = parse(**fields)
    for name in attribute.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert found == value


def biases(model: ModelArchitecture) -> tuple[bool, bool, bool]:
    layer = model.layers[0]
    return layer.mixer.qkv_bias, layer.mixer.output_bias, layer.mlp.bias


def windows(model: ModelArchitecture) -> tuple[int | None, ...]:
    return tuple(layer.mixer.window for layer in model.layers)


def rope_of(**fields: Any) -> RopeConfig:
    rope = parse(**fields).layers[0].mixer.rope
    assert rope is not None
    return rope


def test_biases_follow_the_family() -> None:
    llama, mistral, qwen2, qwen3 = (
        family(name, attention_bias=True, mlp_bias=True) for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    )
    assert biases(llama) == (True, True, True)
    assert biases(mistral) == (False, False, False)
    assert biases(qwen2) == (True, False, False)
    assert biases(qwen3) == (True, True, False)
    assert [model.layers[0].mixer.qk_norm for model in (llama, mistral, qwen2, qwen3)] == [None, None, None, HEAD]
    assert family("Qwen3").head_dims == [128]


def test_a_config_without_weights_is_known_by_its_type() -> None:
    assert parse(architectures=None, model_type="qwen2").name == "Qwen2ForCausalLM"
    assert parse(architectures=["Other", "MistralForCausalLM"]).name == "MistralForCausalLM"
    assert not is_known_family({"model_type": "other"})


def test_a_mistral_window() -> None:
    assert windows(family("Mistral", sliding_window=9)) == (9,) * 4
    assert windows(family("Mistral", sliding_window=None)) == (None,) * 4
    assert windows(family("Mistral", max_position_embeddings=8192)) == (4096,) * 4  # the class default
    assert windows(family("Mistral", sliding_window=512)) == (None,) * 4  # no sequence outgrows it


def test_qwen_windows() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    for name in ("Qwen2", "Qwen3"):
        assert windows(family(name, sliding_window=9)) == (None,) * 4
        in_use: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9}
        assert windows(family(name, **in_use, max_window_layers=3)) == (None, None, None, 9)
        assert windows(family(name, **in_use)) == (None,) * 4  # from layer 28 on
        assert windows(family(name, **in_use, layer_types=kinds)) == (9, None, None, 9)
        assert windows(family(name, use_sliding_window=True, sliding_window=None)) == (None,) * 4


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_both_spellings_of_rope() -> None:
    old = rope_of(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = rope_of(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new == RopeConfig(theta=5e5, kind="llama3", **LLAMA3)  # type: ignore[arg-type]
    assert rope_of(rope_theta=5e5, rope_scaling=None) == RopeConfig(theta=5e5)
    assert rope_of(rope_scaling={"type": "linear", "factor": 2}) == RopeConfig(kind="linear", factor=2.0)
    assert rope_of(rope_parameters={"rope_theta": 7.0}, rope_scaling={"type": "linear", "factor": 2}).theta == 10000


def test_longrope() -> None:
    longrope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    stretched = {**longrope, "original_max_position_embeddings": 128}  # the model has 512 positions
    assert rope_of(rope_scaling=longrope).attention_factor == 1
    assert rope_of(rope_scaling=stretched).attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))
    assert rope_of(rope_scaling={**stretched, "factor": 2.0}).attention_factor == pytest.approx(
        math.sqrt(1 + math.log(2) / math.log(128))
    )
    assert rope_of(rope_scaling={**stretched, "attention_factor": 2}).attention_factor == 2


def test_yarn() -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    rope = rope_of(rope_scaling=yarn)
    assert rope.original_max_position_embeddings == 512
    assert rope.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    assert rope_of(rope_scaling={**yarn, "attention_factor": 2}).attention_factor == 2
    assert rope_of(rope_scaling={**yarn, "mscale": 1, "mscale_all_dim": 1}).attention_factor == 1
    assert rope_of(rope_scaling={**yarn, "truncate": False, "beta_fast": 8}).truncate is False
    stretched = rope_of(rope_scaling={"type": "yarn", "original_max_position_embeddings": 128})
    assert stretched.factor == 4.0  # the model has 512 positions


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", *SUPPORTED_ARCHITECTURES]),
        ({"architectures": None, "model_type": "mamba"}, ["mamba"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"vocab_size": "200"}, ["vocab_size='200'"]),
        ({"vocab_size": True}, ["vocab_size=True"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, ["hidden_size=64", "head_dim is missing"]),
        ({"head_dim": 15}, ["head_dim=15 is odd"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps=0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype='float8_e4m3fn'", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id='</s>'"]),
        ({"eos_token_id": [1, -1]}, ["eos_token_id=[1, -1]"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"attention_multiplier": 0.1}, ["attention_multiplier"]),
        ({"logits_scaling": 8}, ["logits_scaling"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"num_hidden_layers": 2**31 - 1}, ["num_hidden_layers=2147483647 is more than 10000"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "linear", "llama3", "yarn"]),
        ({"rope_scaling": {"type": "longrope"}}, ["short_factor is missing"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}}, ["8 numbers"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 0.0]}}, ["short_factor", "positive numbers"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ["factor=-1"]),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, ["mrope_section"]),
        ({"rope_scaling": "linear"}, ["rope_scaling='linear'"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, ["partial_rotary_factor=0.25"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["full_attention"]),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor", "low_freq"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["sliding_attention", "sliding_window"]),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], words: list[str]) -> None:
    message = refusal(**fields)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["chunked_attention"] * 4}, ["chunked_attention"]),
        ({"layer_types": ["full_attention"] * 3}, ["layer_types", "4 entries"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["sliding_window=0"]),
        ({"use_sliding_window": True, "max_window_layers": "2"}, ["max_window_layers='2'"]),
        ({"num_key_value_heads": ...}, ["num_key_value_heads is missing"]),
    ],
)
def test_a_refusal_of_qwen2(fields: dict[str, Any], words: list[str]) -> None:
    config = {**BASE, "architectures": ["Qwen2ForCausalLM"], **fields}
    with pytest.raises(UnsupportedModelError) as caught:
        parse_architecture({name: value for name, value in config.items() if value is not ...})
    assert all(word in str(caught.value) for word in words), caught.value


def test_mistral_with_layer_types_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        family("Mistral", sliding_window=9, layer_types=["full_attention", "sliding_attention"] * 2)
    assert windows(family("Mistral", sliding_window=9, layer_types=["sliding_attention"] * 4)) == (9,) * 4
