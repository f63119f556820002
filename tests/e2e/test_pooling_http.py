"""Embeddings and scores over HTTP: what official clients get is what `LLM` computes; wrong values are one clear error."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from inflight import LLM
from tests.e2e.openai_server import MODEL, RunningServer, demo_args, running_server, wait_until_idle

TEXTS = ["Anna has a dog.", "What is 2 + 3?", "A story about a fox in the forest.", "Anna has a dog."]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(demo_args(max_model_len=256, hf_overrides={"is_matryoshka": True})) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    with LLM(dtype="float32", num_threads=1) as llm:
        return [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_openais_client(server: RunningServer, expected: list[list[float]]) -> None:
    """It asks for base64, unless its user asks for floats."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model=MODEL, input=TEXTS, **encoding)
        for index, each in enumerate(answer.data):
            found: Any = each.embedding
            if isinstance(found, str):
                found = np.frombuffer(base64.b64decode(found), dtype="<f4")
            np.testing.assert_allclose(found, expected[index], atol=1e-7)
            assert each.index == index
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 4 * len(TEXTS)
    [one] = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8).data
    short = np.array(expected[0][:8])
    np.testing.assert_allclose(one.embedding, short / np.linalg.norm(short), atol=1e-6)
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=MODEL, input=["a", ""])
    assert refused.value.param == "input[1]"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


def test_vectors_of_tokens(http: httpx.Client, expected: list[list[float]]) -> None:
    answer = http.post("/pooling", json={"input": TEXTS[0], "task": "token_embed"}).json()
    [entry] = answer["data"]
    np.testing.assert_allclose(entry["data"][-1], expected[0], atol=1e-6)
    assert len(entry["data"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores(http: httpx.Client, expected: list[list[float]], path: str, names: tuple[str, str]) -> None:
    answer = http.post(path, json={names[0]: TEXTS[0], names[1]: TEXTS}).json()
    scores = [each["score"] for each in answer["data"]]
    assert scores == pytest.approx([float(np.dot(expected[0], each)) for each in expected], abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranking(http: httpx.Client, expected: list[list[float]], path: str) -> None:
    documents: list[Any] = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
    answer = http.post(path, json={"query": TEXTS[0], "documents": documents, "top_n": 2}).json()
    best = [each["index"] for each in answer["results"]]
    scores = [float(np.dot(expected[0], each)) for each in expected[1:]]
    assert best == sorted(range(3), key=lambda index: -scores[index])[:2] and best[0] == 2
    assert answer["results"][0]["document"] == {"text": TEXTS[3]}
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-6)


def test_coheres_and_ollamas_forms(http: httpx.Client, expected: list[list[float]]) -> None:
    body = {"model": MODEL, "texts": TEXTS, "input_type": "search_document", "embedding_types": ["float", "base64"]}
    answer = http.post("/v2/embed", json=body).json()
    np.testing.assert_allclose(answer["embeddings"]["float"], expected, atol=1e-6)
    first = np.frombuffer(base64.b64decode(answer["embeddings"]["base64"][0]), dtype="<f4")
    np.testing.assert_allclose(first, expected[0], atol=1e-6)
    ollama = http.post("/api/embed", json={"model": MODEL, "input": TEXTS}).json()
    np.testing.assert_allclose(ollama["embeddings"], expected, atol=1e-6)
    older = np.array(http.post("/api/embeddings", json={"model": MODEL, "prompt": TEXTS[0]}).json()["embedding"])
    np.testing.assert_allclose(older / np.linalg.norm(older), expected[0], atol=1e-6)


LONG = "a dog " * 400


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/v1/embeddings", {"input": []}, "input", ""),
        ("/v1/embeddings", {}, "input", ""),
        ("/v1/embeddings", {"input": "a", "dimensions": 100_000}, "dimensions", "more than the 256 numbers"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", ""),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
        ("/v1/embeddings", {"input": "a", "input_type": "query"}, "input_type", "not a prompt of this model"),
        ("/v1/embeddings", {"input": LONG}, "input", "maximum context length is 256"),
        ("/v1/embeddings", {"input": [[3, 10**6]]}, "input[0]", "outside the vocabulary"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input", ""),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no prompt"),
        ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]", "maximum context length is 256"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": LONG}]},
            "messages",
            "shorten it, or let it be cut",
        ),
        ("/v1/embeddings", {"input": "a", "input_type": "nix"}, "input_type", "input_type='nix'"),
        ("/classify", {"input": "a"}, "model", "task='classify' is not what this model does"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "2 texts and text_2 has 1"),
        ("/score", {"text_1": "a"}, "text_2", "is missing"),
        ("/rerank", {"query": "a", "documents": []}, "documents", ""),
        ("/score", {"data_1": "", "data_2": ["a"]}, "data_1", "is empty"),
        ("/score", {"data_1": "x", "items": ["a", ""]}, "items[1]", "is empty"),
        ("/score", {"queries": ["a", "b"], "documents": ["a"]}, "queries", "queries has 2 texts and documents has 1"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "is empty"),
        ("/rerank", {"query": LONG, "documents": ["a"]}, "query", "maximum context length is 256"),
        ("/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, "documents[1].text", "is empty"),
        ("/rerank", {"query": "a", "documents": ["a"], "instruct": "x"}, "instruct", "instruct needs a model"),
        ("/rerank", {"query": "a", "documents": ["a"], "instruction": "x"}, "instruction", "leave it out"),
        ("/v2/embed", {"texts": ["a", LONG], "truncate": "NONE"}, "texts[1]", "maximum context length is 256"),
        (
            "/v2/embed",
            {"texts": ["a"], "output_dimension": 100_000},
            "output_dimension",
            "output_dimension=100000 is more",
        ),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["ubinary"]}, "embedding_types[0]", ""),
    ],
)
def test_what_is_wrong_is_one_error(
    server: RunningServer, http: httpx.Client, path: str, body: dict[str, Any], param: str | None, text: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and text in error["message"], error
    wait_until_idle(server)


def test_a_long_text_may_be_cut(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": LONG * 50, "truncate_prompt_tokens": -1}).json()
    assert answer["usage"]["prompt_tokens"] == 256


def test_embeddings_beside_a_stream(server: RunningServer, expected: list[list[float]]) -> None:
    """The chat has the tokens that it has alone, and the vectors are those that are made alone."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}]}
    alone = client.chat.completions.create(**chat, temperature=0, max_tokens=40).choices[0].message.content
    text = ""
    for number, chunk in enumerate(client.chat.completions.create(**chat, temperature=0, max_tokens=40, stream=True)):
        text += chunk.choices[0].delta.content or ""
        if number % 10 == 0:
            found = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float").data
            np.testing.assert_allclose([each.embedding for each in found], expected, atol=1e-7)
    assert text == alone


def test_a_conversation_is_one_text(server: RunningServer, http: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]},
    ]
    for fields in ({}, {"add_generation_prompt": True}):
        opens = bool(fields)
        rendered = {"model": MODEL, "messages": messages, "add_generation_prompt": opens}
        ids = http.post("/tokenize", json=rendered).json()["tokens"]
        expected = http.post("/v1/embeddings", json={"input": ids}).json()
        found = http.post("/v1/embeddings", json={"messages": messages, **fields}).json()
        assert found["data"] == expected["data"] and found["usage"] == expected["usage"]
        assert (
            http.post("/pooling", json={"messages": messages, **fields}).json()["data"][0]["data"]
            == expected["data"][0]["embedding"]
        )
    for wrong, param in (
        ({}, "input"),
        ({"messages": messages, "input": "a"}, "input"),
        ({"messages": messages, "input_type": "query"}, "input_type"),
        ({"messages": []}, "messages"),
        (
            {"messages": messages, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0]",
        ),
    ):
        answer = http.post("/v1/embeddings", json=wrong)
        assert answer.status_code == 400, (wrong, answer.text)
        assert (answer.json()["error"]["param"] or "").startswith(param.partition("[")[0]), (wrong, answer.text)
