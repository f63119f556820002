"""Cohere's SDK: embeddings and reranking."""

from __future__ import annotations

import math

import cohere
import pytest
from conversations import MODEL

TEXTS = ["Anna has a dog.", "What is 2 + 3?", "A story about a fox in the forest."]


@pytest.fixture
def client(url: str, api_key: str) -> cohere.ClientV2:
    return cohere.ClientV2(api_key=api_key, base_url=url, timeout=60)


def test_embeddings(client: cohere.ClientV2) -> None:
    answer = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"])
    vectors = answer.embeddings.float_
    assert vectors is not None and len(vectors) == 3
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1.0] * 3, abs=1e-5)
    assert answer.texts == TEXTS
    assert answer.meta is not None and answer.meta.billed_units is not None
    [alone] = client.embed(model=MODEL, texts=TEXTS[1:2], input_type="search_query").embeddings.float_ or []
    assert alone == pytest.approx(vectors[1], abs=1e-6)
    with pytest.raises(cohere.NotFoundError):
        client.embed(model="other", texts=TEXTS, input_type="search_query")
    with pytest.raises(cohere.BadRequestError):
        client.embed(model=MODEL, texts=["word " * 5000], input_type="search_query", truncate="NONE")


def test_reranking(client: cohere.ClientV2) -> None:
    answer = client.rerank(model=MODEL, query=TEXTS[1], documents=TEXTS, top_n=2)
    assert answer.results[0].index == 1
    scores = [result.relevance_score for result in answer.results]
    assert len(scores) == 2 and scores[0] == pytest.approx(1.0, abs=1e-5) and scores[0] > scores[1]
