"""Vectors and scores of models that transformers' code computes, against transformers alone on the same random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertGenerationConfig,
    Data2VecTextConfig,
    ElectraConfig,
    GPT2Config,
    GPTNeoXConfig,
    JinaEmbeddingsV3Config,
    MambaConfig,
    MegatronBertConfig,
    MobileBertConfig,
    PreTrainedConfig,
    Starcoder2Config,
)

from inflight import LLM, ConfigError
from inflight.config.pooler import CLS, LAST, MEAN
from tests.e2e.test_pooling import engine, hidden_states, normalized, prompts, save

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=200),
    "starcoder2": Starcoder2Config(**SIZES, num_key_value_heads=2),
    "mamba": MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, state_size=8),
    "electra": ElectraConfig(**SIZES, embedding_size=32),
    "data2vec-text": Data2VecTextConfig(**SIZES),  # positions begin behind the number of the padding token
    "jina_embeddings_v3": JinaEmbeddingsV3Config(**SIZES),
}


ENCODERS = ("electra", "data2vec-text", "jina_embeddings_v3")


def pooled(llm: LLM) -> list[np.ndarray[Any, Any]]:
    return [np.array(each.outputs.embedding) for each in llm.embed(prompts(), use_tqdm=False)]


def assert_close(found: list[np.ndarray[Any, Any]], truth: list[np.ndarray[Any, Any]]) -> None:
    for one, other in zip(found, truth, strict=True):
        assert np.abs(one - other).max() < 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_vectors_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    truth = [hidden_states(save(AutoModel, CONFIGS[family], tmp_path), prompt) for prompt in prompts()]
    with engine(tmp_path) as llm:  # LAST of a decoder, CLS of an encoder
        usual = 0 if family in ENCODERS else -1
        assert_close(pooled(llm), [normalized(states[usual]) for states in truth])
        again = pooled(llm)  # with prefix hits, where there are any
        assert_close(again, [normalized(states[usual]) for states in truth])
        found = llm.encode(prompts(), pooling_task="token_embed", use_tqdm=False)
        rows = [states / np.linalg.norm(states, axis=1, keepdims=True) for states in truth]
        assert_close([np.array(each.outputs.data) for each in found], rows)


POOLINGS = {CLS: lambda states: states[0], LAST: lambda states: states[-1], MEAN: lambda states: states.mean(axis=0)}
SCHEDULES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16},
    "one by one": {"max_num_seqs": 1},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize(("schedule", "pooling_type"), list(zip(SCHEDULES, (MEAN, CLS, MEAN, LAST), strict=True)))
def test_schedules_and_ranks(schedule: str, pooling_type: str, tmp_path: Path) -> None:
    """A decoder with its head, which is left unread."""
    save(AutoModelForCausalLM, CONFIGS["starcoder2"], tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    truth = [normalized(POOLINGS[pooling_type](hidden_states(model, prompt))) for prompt in prompts()]
    options = {"runner": "pooling", "pooler_config": {"pooling_type": pooling_type}, **SCHEDULES[schedule]}
    with engine(tmp_path, **options) as llm:
        assert_close(pooled(llm), truth)


def test_an_encoder_with_its_head(tmp_path: Path) -> None:
    save(AutoModelForMaskedLM, CONFIGS["electra"], tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    truth = [normalized(hidden_states(model, prompt).mean(axis=0)) for prompt in prompts()]
    with engine(tmp_path, pooler_config={"pooling_type": MEAN}, dtype="float32") as llm:
        assert_close(pooled(llm), truth)
    with engine(tmp_path, pooler_config={"pooling_type": MEAN}, dtype="bfloat16", quantization="int8") as llm:
        assert all(float(one @ other) > 0.99 for one, other in zip(pooled(llm), truth, strict=True))


def test_classes_of_a_decoder(tmp_path: Path) -> None:
    config = GPTNeoXConfig(**SIZES, num_labels=3)
    model = save(AutoModelForSequenceClassification, config, tmp_path)
    with torch.no_grad():
        truth = [model(torch.tensor([prompt])).logits[0].softmax(-1).numpy() for prompt in prompts()]
    with engine(tmp_path) as llm:
        assert_close([np.array(each.outputs.probs) for each in llm.classify(prompts(), use_tqdm=False)], truth)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MegatronBertConfig(**SIZES), "attention is code of its own"),
        (MobileBertConfig(**SIZES), "neither causal"),
        (BertGenerationConfig(**SIZES, num_labels=3), "classification layers"),
    ],
)
def test_what_would_differ_is_refused(config: PreTrainedConfig, words: str, tmp_path: Path) -> None:
    save(AutoModel, config, tmp_path)
    overrides = (
        {"architectures": ["BertGenerationForSequenceClassification"]} if words.startswith("classification") else {}
    )
    with pytest.raises(ConfigError, match=words):
        engine(tmp_path, hf_overrides=overrides)
