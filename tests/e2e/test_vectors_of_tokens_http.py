"""Sparse vectors (SPLADE) and late interaction (a vector for each token, MaxSim) over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForMaskedLM, PreTrainedModel

from inflight import LLM
from tests.e2e.openai_server import MODEL, RunningServer, demo_args, running_server
from tests.e2e.test_pooling import save
from tests.e2e.test_sparse_vectors import BERT, VOCAB, truth, write_modules

TEXTS = ["w7 w9 w300 w12", "w9 w7", "w100 w101 w102 w103 w104", "w12"]
WORDS = ["Anna has a dog.", "What is 2 + 3?", "A story about a fox in the forest.", "Anna has a dog."]
Vectors = list[np.ndarray[Any, Any]]


def word_tokenizer(folder: Path) -> Tokenizer:
    """A token for each word."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3} | {f"w{index}": index for index in range(4, VOCAB)}
    made = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(folder / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Vectors]]:
    folder = tmp_path_factory.mktemp("splade")
    model: PreTrainedModel = save(AutoModelForMaskedLM, BERT, folder)
    write_modules(folder, "relu")
    tokenizer = word_tokenizer(folder)
    with running_server(demo_args(model=str(folder))) as server:
        yield server, [truth(model, tokenizer.encode(text).ids, "relu") for text in TEXTS]


@pytest.fixture(scope="module")
def late() -> Iterator[tuple[RunningServer, Vectors]]:
    config = {"pooling_type": "ALL"}
    with LLM(dtype="float32", num_threads=1, pooler_config=config) as llm:
        expected = [np.array(each.outputs.data) for each in llm.encode(WORDS, use_tqdm=False)]
    with running_server(demo_args(pooler_config=config)) as server:
        yield server, expected


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:  # Any: JSON
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_scores(server: RunningServer, texts: list[str], expected: list[float]) -> None:
    """Those of the first text with each, on all paths, and their order."""
    for path in ("/score", "/v1/score"):
        found = post(server, path, {"text_1": texts[0], "text_2": texts})["data"]
        assert [each["score"] for each in found] == pytest.approx(expected, rel=1e-5)
    order = sorted(range(len(texts)), key=lambda index: -expected[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = post(server, path, {"query": texts[0], "documents": texts})["results"]
        assert [each["index"] for each in results] == order
        scores = [each["relevance_score"] for each in results]
        assert scores == pytest.approx([expected[index] for index in order], rel=1e-5)


def test_sparse_vectors(sparse: tuple[RunningServer, Vectors]) -> None:
    server, expected = sparse
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    for encoding in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model=MODEL, input=TEXTS, **encoding).data
        for each, theirs in zip(found, expected, strict=True):
            assert len(each.embedding) == VOCAB and 0 < np.count_nonzero(each.embedding) < VOCAB
            np.testing.assert_allclose(each.embedding, theirs, atol=5e-6)
    for theirs, each in zip(expected, post(server, "/pooling", {"input": TEXTS})["data"], strict=True):
        np.testing.assert_allclose(each["data"], theirs, atol=5e-6)
    cohere = post(server, "/v2/embed", {"texts": TEXTS, "embedding_types": ["float"]})["embeddings"]["float"]
    np.testing.assert_allclose(cohere, np.stack(expected), atol=5e-6)
    check_scores(server, TEXTS, [float(expected[0] @ each) for each in expected])
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=MODEL, input="w7", dimensions=7)
    assert refused.value.param == "dimensions"


def test_late_interaction(late: tuple[RunningServer, Vectors]) -> None:
    server, expected = late
    for form in ("float", "base64"):
        answer = post(server, "/pooling", {"input": WORDS, "encoding_format": form})
        for rows, each in zip(expected, answer["data"], strict=True):
            data = each["data"]
            if form == "base64":
                data = np.frombuffer(base64.b64decode(data), dtype="<f4").reshape(rows.shape)
            np.testing.assert_allclose(data, rows, atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    check_scores(server, WORDS, [float((expected[0] @ each.T).max(axis=1).sum()) for each in expected])
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v2/embed", {"texts": ["a"]})):
        answer = httpx.post(server.url + path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "token_embed" in answer.json()["error"]["message"]
