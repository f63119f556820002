"""What the endpoints for vectors ask the engine for, and how they answer. The engine is played: see `PlayedCore._pool`."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from inflight.entrypoints.http.vectors import MAX_RUNNING
from inflight.errors import ErrorKind, OverloadedError
from inflight.interface.pooling import PoolingPart
from tests.unit.entrypoints.api_client import MODEL, serving


def part_of(sequence: Any) -> PoolingPart:
    [part] = sequence.parts
    assert isinstance(part, PoolingPart)
    return part


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"input": "x"}, [2]),
        ({"input": ["x", "yz"]}, [2, 3]),
        ({"input": [120, 121]}, [2]),
        ({"input": [[120], [121, 122, 123]]}, [1, 3]),
        ({"input": "x", "add_special_tokens": False}, [1]),
        ({"input": "x" * 1000, "truncate_prompt_tokens": 7}, [7]),
    ],
)
def test_the_forms_of_input(body: dict[str, Any], prompts: list[int]) -> None:
    with serving() as api:
        answer = api.post("/v1/embeddings", {"model": MODEL, "encoding_format": "base64", **body}).json
        assert [len(prompt) for prompt in api.core.prompts] == prompts
    vectors = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in answer["data"]]
    assert vectors == [[3.0 * length, 4.0 * length] for length in prompts]
    assert answer["usage"] == {"prompt_tokens": sum(prompts), "total_tokens": sum(prompts)}


def test_fields_reach_the_engine() -> None:
    with serving() as api:
        api.post("/v1/embeddings", {"input": "x", "cache_salt": "s", "use_activation": False})
        [sequence] = api.core.sequences
        assert (sequence.cache_salt, part_of(sequence).activation) == ("s", "identity")
        api.post("/pooling", {"input": "x", "task": "token_embed"})
        assert part_of(api.core.sequences[1]).pooling_type == "ALL"
        assert api.post("/v1/embeddings", {"input": "x", "what_is": 1}).headers["x-ignored-fields"] == "what_is"


def test_ranks_and_scores() -> None:
    with serving() as api:
        answer = api.post("/rerank", {"query": "x", "documents": ["a", {"text": "b"}], "return_documents": False}).json
        assert answer["results"] == [{"index": 0, "relevance_score": 1.0}, {"index": 1, "relevance_score": 1.0}]
        assert answer["usage"]["total_tokens"] == 6
        answer = api.post("/score", {"text_1": ["x", "y"], "text_2": ["a", "b"]}).json
        assert [each["score"] for each in answer["data"]] == [1.0, 1.0]


def test_a_failed_text_ends_all_of_its_request() -> None:
    with serving() as api:
        api.core.held = True
        exchange = api.open("/v1/embeddings", {"input": ["a", "b", "c"]})
        exchange.until(lambda: len(api.core.sequences) == 3)
        api.core.fail(1, "a step failed", ErrorKind.ENGINE)
        api.core._pool(0)
        exchange.until(lambda: exchange.answer.is_over)
        assert exchange.answer.status == 500
        assert api.core.sequences[2].request_id in api.core.aborted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["x", "y"]}),
        ("/pooling", {"input": ["x", "y"]}),
        ("/v2/embed", {"texts": ["x", "y"]}),
        ("/score", {"text_1": "x", "text_2": ["a", "b"]}),
        ("/v1/score", {"text_1": "x", "text_2": ["a", "b"]}),
        ("/rerank", {"query": "x", "documents": ["a", "b"]}),
        ("/v2/rerank", {"query": "x", "documents": ["a", "b"]}),
        ("/api/embed", {"model": MODEL, "input": ["x", "y"]}),
        ("/api/embeddings", {"model": MODEL, "prompt": "x"}),
    ],
)
def test_a_vector_that_is_not_finite_is_an_error_of_its_request_alone(path: str, body: dict[str, Any]) -> None:
    """Another request runs beside it."""
    with serving() as api:
        api.core.held = True
        wrong = api.open(path, body)
        wrong.until(lambda: len(api.core.sequences) > 0)
        num_wrong = len(api.core.sequences)
        beside = api.open("/v1/embeddings", {"input": "beside"})
        beside.until(lambda: len(api.core.sequences) == num_wrong + 1)
        api.core._pool(num_wrong)
        api.core.vector = (math.nan, 1.0)
        for index in range(num_wrong):
            api.core._pool(index)
        for exchange in (wrong, beside):
            exchange.until(lambda exchange=exchange: exchange.answer.is_over)  # type: ignore[misc]
        assert (wrong.answer.status, beside.answer.status) == (500, 200)


def test_a_request_with_many_texts_gives_its_turn_to_others() -> None:
    """At most `MAX_RUNNING` texts of a request are in the engine at a time."""
    with serving() as api:
        answer = api.post("/v1/embeddings", {"input": ["x"] * 1100 + ["yz"]})
        assert len(answer.json["data"]) == len(api.core.sequences) == 1101
        assert answer.json["data"][-1]["embedding"] == [9.0, 12.0]
        api.core.forget()
        api.core.held = True
        exchange = api.open("/v1/embeddings", {"input": ["x"] * 1100})
        exchange.until(lambda: len(api.core.sequences) == MAX_RUNNING)
        exchange.leave()
        assert len(api.core.sequences) == len(api.core.aborted) == MAX_RUNNING


def test_a_request_that_has_begun_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue refuses a request before its first text, and not when half of it is computed."""
    with serving() as api:
        submit, calls = api.engine.submit_all, []

        def full_at_second(*arguments: Any, **more: Any) -> Any:
            calls.append(len(arguments[0]))
            if len(calls) in (2, 3):
                raise OverloadedError("the queue is full", retry_after_seconds=1)
            return submit(*arguments, **more)

        monkeypatch.setattr(api.engine, "submit_all", full_at_second)
        answer = api.post("/v1/embeddings", {"input": ["x"] * (MAX_RUNNING + 3)})
        assert answer.status == 200 and calls == [MAX_RUNNING, 3, 3, 3]
        calls[:] = [0]
        assert api.post("/v1/embeddings", {"input": "x"}).status == 503
