"""SPLADE: vectors with a number for each token of the vocabulary, most of them 0, against transformers on random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    DistilBertConfig,
    MPNetConfig,
    PreTrainedModel,
    RobertaConfig,
)

from inflight import InvalidRequestError, PoolingParams
from inflight.errors import UnsupportedModelError
from tests.e2e.test_pooling import embeddings, engine, prompts, qwen3, save

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
BERT = BertConfig(**SIZES)
DISTILBERT = DistilBertConfig(
    vocab_size=VOCAB, dim=64, hidden_dim=96, n_layers=2, n_heads=4, max_position_embeddings=256, activation="relu"
)


def write_modules(folder: Path, activation: str) -> None:
    kinds = ("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.sparse_encoder.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    pooling = {"pooling_strategy": "max", "activation_function": activation}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling))


@torch.no_grad()
def truth(model: PreTrainedModel, prompt: list[int], activation: str) -> np.ndarray[Any, Any]:
    found = torch.log1p(torch.relu(model(torch.tensor([prompt])).logits[0]))
    found = torch.log1p(found) if activation == "log1p_relu" else found
    return found.amax(dim=0).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        (BERT, "relu"),
        (BERT, "log1p_relu"),
        (DISTILBERT, "relu"),
        (RobertaConfig(**SIZES), "relu"),
        (MPNetConfig(**SIZES), "relu"),
    ],
    ids=["bert", "log1p", "distilbert", "roberta", "mpnet"],
)
def test_vectors_are_those_of_transformers(tmp_path: Path, config: Any, activation: str) -> None:
    model = save(AutoModelForMaskedLM, config, tmp_path)
    write_modules(tmp_path, activation)
    expected = [truth(model, prompt, activation) for prompt in prompts()]
    assert all(0 < np.count_nonzero(each) < VOCAB for each in expected), "the vectors are not sparse"
    for arguments in ({}, {"max_num_seqs": 1}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with engine(tmp_path, **arguments) as llm:
            for ours, theirs in zip(embeddings(llm), expected, strict=True):
                assert ours.shape == (VOCAB,)
                np.testing.assert_allclose(ours, theirs, atol=5e-6, err_msg=str(arguments))
            [output] = llm.score([prompts()[3]], [prompts()[5]], use_tqdm=False)  # type: ignore[list-item]
            assert output.outputs.score == pytest.approx(float(expected[3] @ expected[5]), rel=1e-5)
            with pytest.raises(InvalidRequestError, match="task='token_embed' is not what this model does"):
                llm.encode(prompts(), pooling_task="token_embed", use_tqdm=False)
            with pytest.raises(InvalidRequestError, match="may be cut"):
                llm.embed(prompts(), pooling_params=PoolingParams(dimensions=7), use_tqdm=False)


def test_a_model_without_the_head_is_refused(tmp_path: Path) -> None:
    save(AutoModelForMaskedLM, BERT, tmp_path)
    write_modules(tmp_path, "relu")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    with pytest.raises(UnsupportedModelError, match="sparse vectors need a BertForMaskedLM"):
        engine(tmp_path)


def test_decoders_have_none(tmp_path: Path) -> None:
    save(AutoModelForCausalLM, qwen3(), tmp_path)
    write_modules(tmp_path, "relu")
    with pytest.raises(UnsupportedModelError, match="sparse vectors need"):
        engine(tmp_path)
