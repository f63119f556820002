"""Each kind of wrong input on each endpoint for vectors and scores: one error that names the field, before anything is
computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from transformers import AutoModelForSequenceClassification, LlamaConfig

from inflight.hub import EMBEDDED_MODEL
from tests.e2e.openai_server import MODEL, demo_args, running_server
from tests.e2e.test_pooling import SIZES, save

LONG = "a dog " * 400
Body = dict[str, Any]
# Each endpoint -> how its body has a list of texts, and the name of the field with them
ENDPOINTS: dict[str, tuple[Callable[[Any], Body], str]] = {
    "/v1/embeddings": (lambda texts: {"input": texts}, "input"),
    "/pooling": (lambda texts: {"input": texts}, "input"),
    "/classify": (lambda texts: {"input": texts}, "input"),
    "/v2/embed": (lambda texts: {"texts": texts, "truncate": "NONE"}, "texts"),
    "/api/embed": (lambda texts: {"model": MODEL, "input": texts, "truncate": False}, "input"),
    **{path: (lambda texts: {"text_1": "a", "text_2": texts}, "text_2") for path in ("/score", "/v1/score")},
    **{
        path: (lambda texts: {"query": "a", "documents": texts}, "documents")
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
}
# Kind -> the texts, and the place of the wrong one
TEXTS: dict[str, tuple[Any, str]] = {
    "none": ([], ""),
    "more than the limit": (["x"] * 2049, ""),
    "too long": (["a", LONG], "[1]"),
    "empty": (["a", ""], "[1]"),
    "a number": ([1.5], "[0]"),
    "null": (None, ""),
}
DIMENSIONS = {
    "/v1/embeddings": "dimensions",
    "/pooling": "dimensions",
    "/v2/embed": "output_dimension",
    "/api/embed": "dimensions",
}
MAKES_VECTORS = [path for path in ENDPOINTS if path != "/classify"]
NEEDS_VECTORS = [path for path in MAKES_VECTORS if path != "/pooling"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[httpx.Client]:
    with running_server(demo_args(max_model_len=256)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http
        assert num_computed(http) == 0


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Three classes of single texts."""
    folder = tmp_path_factory.mktemp("classifier")
    save(AutoModelForSequenceClassification, LlamaConfig(**{**SIZES, "vocab_size": 4096}, num_labels=3), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, folder)
    args = demo_args(model=str(folder), max_model_len=256)
    with running_server(args) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http
        assert num_computed(http) == 0


def num_computed(http: httpx.Client) -> float:
    """The prompt tokens of requests that have ended."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("inflight:prompt_tokens_total"))


def assert_refused(http: httpx.Client, path: str, body: Body, param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if path.startswith("/api/"):  # Ollama's errors are one text
        assert isinstance(error, str) and (param == "model" or param in error), error
    else:
        assert error["param"] == param and error["type"] == "invalid_request_error", error


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_texts(embedder: httpx.Client, classifier: httpx.Client, path: str, kind: str) -> None:
    body_of, field = ENDPOINTS[path]
    texts, place = TEXTS[kind]
    http = classifier if path == "/classify" else embedder
    assert_refused(http, path, body_of(texts), field + place)


@pytest.mark.parametrize("value", [8, 100_000, 0, -1, True, "8x"])
@pytest.mark.parametrize("path", DIMENSIONS)
def test_dimensions(embedder: httpx.Client, path: str, value: object) -> None:
    """8: config.json does not say that the vectors may be cut."""
    assert_refused(embedder, path, {**ENDPOINTS[path][0](["a"]), DIMENSIONS[path]: value}, DIMENSIONS[path])


@pytest.mark.parametrize("path", NEEDS_VECTORS)
def test_vectors_and_pairs_of_a_model_that_classifies_texts(classifier: httpx.Client, path: str) -> None:
    assert_refused(classifier, path, ENDPOINTS[path][0](["a", "b"]), "model")


def test_tasks(embedder: httpx.Client, classifier: httpx.Client) -> None:
    assert_refused(embedder, "/classify", {"input": "a"}, "model")
    for task in ("classify", "token_classify", "score", 3):
        assert_refused(embedder, "/pooling", {"input": "a", "task": task}, "task")
    for task in ("embed", "token_embed"):
        assert_refused(classifier, "/pooling", {"input": "a", "task": task}, "task")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/api/chat", {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_text_of_a_model_that_classifies(classifier: httpx.Client, path: str, body: Body) -> None:
    assert_refused(classifier, path, body, "model")


@pytest.mark.parametrize("prompt", ["", None, [], 3])
def test_ollamas_older_form(embedder: httpx.Client, classifier: httpx.Client, prompt: object) -> None:
    assert_refused(embedder, "/api/embeddings", {"model": MODEL, "prompt": prompt}, "prompt")
    assert_refused(classifier, "/api/embeddings", {"model": MODEL, "prompt": "a"}, "model")
