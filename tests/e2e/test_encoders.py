"""Embeddings of encoders through the whole engine, against transformers on the same random weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, EuroBertConfig

from inflight import ConfigError
from inflight.config.pooler import CLS, MEAN
from tests.e2e.test_pooling import engine, normalized
from tests.support.encoders import ENCODER_CONFIGS, reference_hidden, texts_of, write_encoder
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.unit.model_loader.test_gguf_encoders import CONFIGS, write_file

TEXTS = texts_of((1, 2, 15, 16, 17, 40, 130, 300, 7, 64))
Vectors = list[np.ndarray[Any, Any]]


def embeddings(folder: Path, texts: list[list[int]], **arguments: Any) -> Vectors:
    with engine(folder, **arguments) as llm:
        found = llm.embed(texts, use_tqdm=False)
    return [np.array(each.outputs.embedding) for each in found]


def truth(folder: Path, pooling_type: str) -> Vectors:
    hidden = [each.double().numpy() for each in reference_hidden(folder, TEXTS)]
    return [normalized(each[0] if pooling_type == CLS else each.mean(axis=0)) for each in hidden]


@pytest.mark.parametrize("family", ENCODER_CONFIGS)
def test_embeddings_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS[family][0], tmp_path / "model", seed=3)
    usual = embeddings(folder, TEXTS)
    np.testing.assert_allclose(np.stack(usual), np.stack(truth(folder, CLS)), atol=2e-5)
    means = embeddings(folder, TEXTS, pooler_config={"pooling_type": MEAN}, max_model_len=300)
    np.testing.assert_allclose(np.stack(means), np.stack(truth(folder, MEAN)), atol=2e-5)


FOR_CLASSES = {family: configs[0] for family, configs in ENCODER_CONFIGS.items()}
FOR_CLASSES |= {
    f"eurobert, {pooling}": EuroBertConfig(
        **ENCODER_CONFIGS["eurobert"][0].to_diff_dict() | {"classifier_pooling": pooling}
    )
    for pooling in ("bos", "mean")
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, AutoModelForSequenceClassification) for family in FOR_CLASSES),
        *((family, AutoModelForTokenClassification) for family in ENCODER_CONFIGS if family != "gemma3"),
    ],
)
def test_classes_are_those_of_transformers(family: str, kind: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(FOR_CLASSES[family])
    config.num_labels = 3
    folder = write_encoder(config, tmp_path / "model", seed=8, kind=kind)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with engine(folder) as llm:
        found = llm.encode(TEXTS, use_tqdm=False)
    for output, text in zip(found, TEXTS, strict=True):
        with torch.no_grad():
            theirs = model(torch.tensor([text])).logits[0].softmax(-1)
        np.testing.assert_allclose(output.outputs.data, theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("arguments", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"max_num_seqs": 1}])
def test_ranks_stages_and_small_batches(arguments: dict[str, Any], tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS["modernbert"][0], tmp_path / "model", seed=4)
    found = embeddings(folder, TEXTS, **arguments)
    np.testing.assert_allclose(np.stack(found), np.stack(truth(folder, CLS)), atol=2e-5)


@pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="the C++ kernels are not here")
def test_a_vector_is_the_same_bit_for_bit_alone_and_in_a_batch(tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS["bert"][0], tmp_path / "model", seed=5)
    with engine(folder, dtype="bfloat16", batch_invariant=True) as llm:
        together = [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]
        alone = [llm.embed([text], use_tqdm=False)[0].outputs.embedding for text in TEXTS]
    assert together == alone


def test_a_budget_that_is_smaller_than_a_text_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS["bert"][0], tmp_path / "model", seed=6)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=100 .*max_model_len=512"):
        engine(folder, max_num_batched_tokens=100)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_gguf_file_says_how_its_model_pools(family: str, tmp_path: Path) -> None:
    folder = write_encoder(CONFIGS[family], tmp_path / "model", seed=7)
    found = embeddings(write_file(family, folder), TEXTS)
    np.testing.assert_allclose(np.stack(found), np.stack(truth(folder, MEAN)), atol=2e-5)
