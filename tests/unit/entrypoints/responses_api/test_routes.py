"""/v1/responses and /v1/responses/input_tokens over a played engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.entrypoints.api_client import MODEL, SETTINGS, Api, serving

PATH, COUNT = "/v1/responses", "/v1/responses/input_tokens"
PROMPT = b"<user>x<assistant>"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as made:
        yield made


def test_an_answer(api: Api) -> None:
    answer = api.post(PATH, {"input": "x", "instructions": "s", "max_output_tokens": 9}, {"x-request-id": "mine"})
    assert answer.headers["content-type"] == "application/json"
    found = answer.json
    assert (found["id"], found["object"], found["status"], found["model"]) == (
        "resp-mine",
        "response",
        "completed",
        MODEL,
    )
    (item,) = found["output"]
    assert item["content"][0]["text"] == "Hi!"
    assert found["usage"]["input_tokens"] == len(b"<system>s") + len(PROMPT)
    assert api.core.prompts[-1] == [*b"<system>s", *PROMPT]
    assert api.core.sequences[-1].sampling.max_tokens == 9


def test_a_stream_begins_before_its_first_token(api: Api) -> None:
    api.core.held = True
    exchange = api.open(PATH, {"input": "x", "stream": True})
    exchange.until(lambda: exchange.answer.parts)
    api.core.held = False
    assert exchange.answer.text.startswith("event: response.created\n")
    exchange.leave()
    kinds = [event["type"] for event in api.post(PATH, {"input": "x", "stream": True}).events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_the_tokens_of_the_input_are_counted_and_nothing_is_generated(api: Api) -> None:
    before = len(api.core.sequences)
    answer = api.post(COUNT, {"input": "xyz", "instructions": "s"})
    assert answer.json == {"object": "response.input_tokens", "input_tokens": len(b"<system>s") + len(PROMPT) + 2}
    assert answer.headers["content-type"] == "application/json"
    assert len(api.core.sequences) == before


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_what_is_left_out_is_named(api: Api, path: str) -> None:
    answer = api.post(path, {"input": "x", "tools": [{"type": "web_search"}], "of_another": 1})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "of_another, tools[] (web_search)")
    assert "x-ignored-fields" not in api.post(path, {"input": "x"}).headers


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"input": "x", "model": "third"}, 404, "model", "model_not_found"),
        ({"input": "x", "previous_response_id": "r"}, 404, "previous_response_id", "previous_response_not_found"),
        ({"input": []}, 400, "input", None),
        ({}, 400, "input", None),
        ({"input": "x" * 10_000}, 400, "input", "context_length_exceeded"),
        ({"input": "x", "temperature": "1"}, 400, "temperature", None),
    ],
)
def test_what_is_refused(api: Api, path: str, body: dict[str, Any], status: int, param: str, code: str | None) -> None:
    answer = api.post(path, body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (status, param, code)


def test_a_wrong_tool_is_named_by_its_place_in_the_request() -> None:
    """It has another number among the tools that the model sees."""
    wrong = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "array"}}
    with serving(replace(SETTINGS, tool_call_parser="hermes")) as api:
        answer = api.post(PATH, {"input": "x", "tools": [{"type": "web_search"}, wrong]})
        assert (answer.status, answer.error["param"]) == (400, "tools[1]")
        assert "'f') is strict" in answer.error["message"]
