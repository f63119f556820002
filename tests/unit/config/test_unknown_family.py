"""Which code computes a model, and what is known of it before transformers reads its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.config.architecture import INFLIGHT, TRANSFORMERS, ModelArchitecture
from inflight.config.unknown_family import describe_model, native_refusal
from inflight.errors import UnsupportedModelError
from tests.support.model_zoo import FALLBACK_CONFIGS, FAMILY_CONFIGS, VOCAB_SIZE


@pytest.mark.parametrize("family", FALLBACK_CONFIGS)
def test_sizes_of_every_family(family: str) -> None:
    config = FALLBACK_CONFIGS[family][0]
    found = describe_model(config.to_dict(), "transformers")
    assert found.implementation == TRANSFORMERS
    num_heads = [layer.mixer.num_heads for layer in found.layers]
    # Falcon Mamba has no attention: then there is one head, and no named limit.
    heads, positions = (1, 8192) if family == "falcon_mamba" else (4, 1024)
    assert (found.vocab_size, found.hidden_size, num_heads) == (VOCAB_SIZE, 64, [heads, heads])
    assert found.max_position_embeddings == positions


@pytest.mark.parametrize(
    ("model_impl", "expected"), [("auto", INFLIGHT), ("inflight", INFLIGHT), ("transformers", TRANSFORMERS)]
)
def test_a_known_family_runs_on_the_code_that_is_asked_for(model_impl: str, expected: str) -> None:
    assert describe_model(FAMILY_CONFIGS["qwen3"][0].to_dict(), model_impl).implementation == expected


def test_sizes_in_a_nested_configuration() -> None:
    text = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 20}
    found = describe_model({"model_type": "x", "vocab_size": 5, "text_config": text}, "auto")
    assert (found.vocab_size, [layer.mixer.head_dim for layer in found.layers]) == (9, [32] * 3)
    assert found.max_position_embeddings == 8192  # no field names a limit


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "has an encoder"),
        ({"model_type": "x", "vocab_size": 5, "hidden_size": "big"}, "hidden_size='big'"),
        ({"model_type": "x", "hidden_size": 5, "num_hidden_layers": 1}, "vocab_size is missing"),
    ],
)
def test_what_cannot_be_described(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        describe_model(config, "auto")


VARIANT = {**FAMILY_CONFIGS["llama"][0].to_dict(), "hidden_act": "gelu", "architectures": ["LlamaForCausalLM"]}


def test_auto_goes_on_to_transformers_for_a_variant_that_is_refused() -> None:
    found = describe_model(VARIANT, "auto")
    assert found.implementation == TRANSFORMERS and "hidden_act='gelu'" in found.not_native
    assert "hidden_act='gelu'" in native_refusal(found) and "--model-impl" in native_refusal(found)
    assert native_refusal(describe_model(VARIANT, "transformers")) == ""


@pytest.mark.parametrize(("model_impl", "is_gguf"), [("inflight", False), ("auto", True)])
def test_a_variant_that_only_transformers_computes(model_impl: str, is_gguf: bool) -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_act='gelu'") as caught:
        describe_model(VARIANT, model_impl, gguf=Path("x.gguf") if is_gguf else None)
    assert ("--model-impl" in str(caught.value)) is not is_gguf  # transformers' code does not read GGUF files


@pytest.mark.parametrize(
    ("family", "model_impl", "implementation"),
    [("deepseek_v2", "auto", TRANSFORMERS), ("deepseek_v2", "inflight", INFLIGHT), ("qwen3_moe", "auto", INFLIGHT)],
)
def test_auto_goes_on_to_transformers_on_a_gpu_for_layers_that_we_compute_on_cpus(
    family: str, model_impl: str, implementation: str
) -> None:
    config = FAMILY_CONFIGS[family][0].to_dict()
    found = describe_model(config, model_impl, device="cuda")
    assert found.implementation == implementation
    assert ("latent attention" in found.not_native) is (implementation == TRANSFORMERS)
    assert describe_model(config, model_impl).implementation == INFLIGHT


def test_a_configuration_that_nobody_can_read_is_refused_by_the_family() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_size='big'"):
        describe_model({**VARIANT, "hidden_size": "big"}, "auto")


def test_transformers_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.config.unknown_family.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'inflight-llm\[transformers\]'"):
        describe_model({"architectures": ["GPT2LMHeadModel"]}, "auto")


def described(**fields: Any) -> ModelArchitecture:
    sizes = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return describe_model({"model_type": "x", **sizes, **fields}, "auto")


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({}, (2, 2, 16)),
        ({"num_key_value_heads": 1, "head_dim": 16}, (2, 1, 16)),
        ({"head_dim": 17}, (2, 2, 32)),
        ({"num_attention_heads": [1, 4, 2], "head_dim": 8}, (4, 4, 16)),  # of each layer
        ({"num_attention_heads": 64}, (64, 64, 16)),  # more than features
        ({"num_attention_heads": None}, (1, 1, 32)),
    ],
)
def test_heads(fields: dict[str, Any], heads: tuple[int, int, int]) -> None:
    (attention, *_) = described(**fields).attentions
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == heads


def test_sizes_by_layer_and_by_default() -> None:
    found = described()
    assert (found.layers[0].mlp.size, found.max_position_embeddings, found.num_layers) == (128, 8192, 3)
    found = described(intermediate_size=[40, 50], n_ctx=77, max_position_embeddings=None, eos_token_id=[3, 4])
    assert (found.layers[0].mlp.size, found.max_position_embeddings, found.eos_token_ids) == (50, 77, (3, 4))
    assert described(num_hidden_layers=None, layers_block_type=["mamba", "attention"]).num_layers == 2
    assert described(dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["A", "B"], "model_type": "x"}, "A, B"),
        ({"model_type": "x"}, "model_type x"),
        ({}, "model_type unknown"),
    ],
)
def test_the_name_of_an_unknown_family(config: dict[str, Any], name: str) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 3}
    assert describe_model({**sizes, **config}, "auto").name == name
