"""Families that only transformers knows: greedy tokens equal those of transformers alone, and what would differ is refused."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BloomConfig,
    FalconConfig,
    Llama4TextConfig,
    MiniMaxConfig,
    MptConfig,
    Phi3Config,
    PreTrainedConfig,
    RwkvConfig,
)

from inflight import LLM, SamplingParams
from inflight.errors import CheckpointError, ConfigError, UnsupportedModelError
from inflight.models.transformers_fallback.attention import Mask
from tests.e2e.greedy_truth import Comparison
from tests.support.model_zoo import FALLBACK_CONFIGS, FAMILY_CONFIGS, VOCAB_SIZE, reference_model, write_model

MAX_MODEL_LEN = 200
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def start(folder: Path, **arguments: Any) -> LLM:
    defaults = {
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 24,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "model_impl": "transformers",
    }
    return LLM(str(folder), **{**defaults, **arguments})


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 40, 130)]


@pytest.mark.parametrize("family", [*FALLBACK_CONFIGS, "llama"])
def test_tokens_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    config = {**FAMILY_CONFIGS, **FALLBACK_CONFIGS}[family][0]
    folder = write_model(config, tmp_path / "model", seed=0)
    truth, comparison = reference_model(folder), Comparison()
    with start(folder) as llm:
        for output in [
            *llm.generate(prompts(), GREEDY, use_tqdm=False),
            *llm.generate(prompts(), GREEDY, use_tqdm=False),
        ]:
            comparison.add(truth, output.prompt_token_ids, output.outputs[0].token_ids)
    assert comparison.num_tokens == 2 * 4 * 16


@pytest.mark.parametrize("more", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_formats_of_weights_and_cache(tmp_path: Path, more: dict[str, Any]) -> None:
    folder = write_model(FALLBACK_CONFIGS["olmo2"][0], tmp_path / "model", seed=0)
    truth = reference_model(folder)
    with start(folder, **more) as llm:
        [output] = llm.generate(
            [prompts()[2]], SamplingParams(max_tokens=1, temperature=0.0, logprobs=20), use_tqdm=False
        )
    ours = (output.outputs[0].logprobs or [])[0]
    with torch.inference_mode():
        theirs = truth(torch.tensor([prompts()[2]])).logits[0, -1].log_softmax(-1)
    assert all(abs(float(theirs[token]) - entry.logprob) < 1.0 for token, entry in ours.items())


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "mixtral"])
def test_two_ranks(tmp_path: Path, family: str) -> None:
    folder = write_model(FALLBACK_CONFIGS[family][0], tmp_path / "model", seed=0)
    truth, comparison = reference_model(folder), Comparison()
    with start(folder, tensor_parallel_size=2) as llm:
        for output in llm.generate(prompts(), GREEDY, use_tqdm=False):
            comparison.add(truth, output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.mark.parametrize(("family", "tp_size"), [("gemma2", 1), ("qwen3_moe", 2), ("olmo_hybrid", 1)])
def test_two_stages(tmp_path: Path, family: str, tp_size: int) -> None:
    folder = write_model(FALLBACK_CONFIGS[family][0], tmp_path / "model", seed=0)
    truth, comparison = reference_model(folder), Comparison()
    with start(folder, tensor_parallel_size=tp_size, pipeline_parallel_size=2) as llm:
        for output in llm.generate(prompts(), GREEDY, use_tqdm=False):
            comparison.add(truth, output.prompt_token_ids, output.outputs[0].token_ids)


def test_several_ranks_need_a_plan(tmp_path: Path) -> None:
    FALLBACK_CONFIGS["gpt2"][0].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no plan to divide"):
        start(tmp_path, load_format="dummy", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="no plan to cut it into stages"):
        start(tmp_path, load_format="dummy", pipeline_parallel_size=2)


def test_the_memory_of_a_step_is_measured(tmp_path: Path) -> None:
    """One layer of each kind of cache computes anything then."""
    folder = write_model(FALLBACK_CONFIGS["falcon_h1"][0], tmp_path / "model", seed=0)
    with start(folder, kv_cache_memory_bytes=None) as llm:
        assert len(llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    FALLBACK_CONFIGS["mixtral"][0].save_pretrained(tmp_path)
    with start(tmp_path, load_format="dummy") as llm:
        assert len(llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 16


# ---- what is refused -------------------------------------------------------------------------------------------------

_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MiniMaxConfig(**SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=2),
            "layers need 'get_linear_cache' of a cache of their own",
        ),
        (
            RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, context_length=128),
            "reads 'weight' of a linear layer itself",
        ),
        (
            MptConfig(vocab_size=VOCAB_SIZE, d_model=64, n_layers=2, n_heads=4, max_seq_len=256),
            "computes with its mask, in torch's masked_fill: its attention is code of its own",
        ),
        (BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4), "computes with its mask"),
        (
            BartConfig(vocab_size=VOCAB_SIZE, d_model=64, decoder_layers=2, is_encoder_decoder=False),
            "input of a decoder layer",
        ),
        (
            Phi3Config(
                **SMALL,
                intermediate_size=96,
                rope_parameters=_LONG_ROPE,
                original_max_position_embeddings=64,
                max_position_embeddings=1024,
            ),
            "lower max_model_len",
        ),
        (
            Llama4TextConfig(
                **SMALL,
                intermediate_size=96,
                num_local_experts=2,
                num_key_value_heads=2,
                no_rope_layers=[0, 1],
                head_dim=16,
            ),
            "counts the positions of its tokens itself",
        ),
    ],
    ids=["recurrent", "linear", "own attention", "alibi", "positions", "longrope", "arange"],
)
def test_what_would_differ_is_refused(tmp_path: Path, config: PreTrainedConfig, message: str) -> None:
    folder = write_model(config, tmp_path / "model", seed=0)
    with pytest.raises(UnsupportedModelError, match=message):
        start(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4 and 2 key/value heads"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"model_impl": "inflight"}, "is not supported; supported are"),
        ({"model_impl": "vllm"}, "is not supported; supported are"),  # vLLM's word for the engine's own code
        ({"model_impl": "other"}, "model_impl='other'"),
    ],
)
def test_arguments_that_do_not_go_with_it(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    FALLBACK_CONFIGS["dots1"][0].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, load_format="dummy", **arguments)


def test_a_variant_that_inflight_refuses_runs_on_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = copy.deepcopy(FAMILY_CONFIGS["llama"][0])
    config.hidden_act = "gelu"
    folder = write_model(config, tmp_path / "model", seed=0)
    truth, comparison = reference_model(folder), Comparison()
    with caplog.at_level("INFO", "inflight"), start(folder, model_impl="auto") as llm:
        for output in llm.generate(prompts(), GREEDY, use_tqdm=False):
            comparison.add(truth, output.prompt_token_ids, output.outputs[0].token_ids)
    lines = [record.getMessage() for record in caplog.records if "model_impl='transformers'" in record.getMessage()]
    assert len(lines) == 1 and "hidden_act='gelu'" in lines[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"batch_invariant": True}, r"batch_invariant=True.*--model-impl.*'gelu'"),
        ({"tensor_parallel_size": 4}, r"2 key/value heads.*--model-impl.*'gelu'"),
        ({"hf_overrides": {"model_type": "no such type"}}, r"cannot read this configuration.*--model-impl.*'gelu'"),
    ],
)
def test_a_refusal_of_both_names_both_causes(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    config = copy.deepcopy(FAMILY_CONFIGS["llama"][0])
    config.hidden_act = "gelu"
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, load_format="dummy", model_impl="auto", **more)


def test_attention_in_code_of_the_model_is_the_named_cause(tmp_path: Path) -> None:
    FalconConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModelError, match="its attention is code of its own"):
        start(tmp_path, load_format="dummy")


def test_wrong_checkpoints(tmp_path: Path) -> None:
    folder = write_model(FALLBACK_CONFIGS["olmo2"][0], tmp_path / "model", seed=0)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, message in (
        ({key: value for key, value in weights.items() if key != name}, f"lacks {name}"),
        ({**weights, "model.layers.1.mlp.other.weight": weights[name].clone()}, "does not account for"),
        ({**weights, name: weights[name][:5].clone()}, "has shape"),
    ):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            start(folder)


def test_code_of_the_model_runs_only_if_asked(tmp_path: Path) -> None:
    config = {
        "model_type": "house_brand",
        "architectures": ["HouseForCausalLM"],
        "auto_map": {"AutoConfig": "house.HouseConfig", "AutoModelForCausalLM": "house.HouseForCausalLM"},
        **SMALL,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "house.py").write_text(
        "from transformers import Olmo2Config, Olmo2ForCausalLM\n"
        "class HouseConfig(Olmo2Config):\n    model_type = 'house_brand'\n"
        "class HouseForCausalLM(Olmo2ForCausalLM):\n    config_class = HouseConfig\n"
    )
    with pytest.raises(UnsupportedModelError, match=r"--trust-remote-code"):
        start(tmp_path, load_format="dummy")
    with start(tmp_path, load_format="dummy", trust_remote_code=True) as llm:
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("visible", "window"),
    [
        (lambda _, __, query, key: key <= query, None),
        (lambda _, __, query, key: (key <= query) & (key > query - 7), 7),
        (lambda _, __, query, key: (key <= query) & (key > query - 500), None),  # wider than the longest sequence
    ],
)
def test_masks_are_read(visible: Any, window: int | None) -> None:
    assert Mask(visible, False).window(333) == window


@pytest.mark.parametrize(
    "visible",
    [
        lambda _, __, query, key: key >= 0 * query,  # every token sees all
        lambda _, __, query, key: (key <= query) & (key // 64 == query // 64),  # chunks
        lambda _, __, query, key: (key <= query) & (key != 5),
    ],
)
def test_other_masks_are_refused(visible: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
        Mask(visible, False).window(333)
