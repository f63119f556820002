"""From exception to answer, and the path of the field that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.http.error_handlers import validation_error
from inflight.entrypoints.http.errors import ApiError, to_api_error
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from inflight.entrypoints.pooling_api.protocol import EmbeddingRequest
from inflight.errors import (
    ContextLengthExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineRecoveringError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    TokenizerError,
)

ERRORS: list[tuple[Exception, int, str | None, dict[str, str]]] = [
    (InvalidRequestError("x"), 400, None, {}),
    (TokenizerError("x"), 400, None, {}),
    (ContextLengthExceededError("x"), 400, "context_length_exceeded", {}),
    (OverloadedError("x", retry_after_seconds=7), 503, "overloaded", {"Retry-After": "7"}),
    (RequestTimeoutError("x"), 504, "request_timeout", {}),
    (EngineClosedError("x"), 503, "shutting_down", {"Retry-After": "1"}),
    (EngineRecoveringError("x"), 500, "engine_recovering", {}),
    (EngineDeadError("x"), 503, "engine_dead", {}),
    (EngineError("x"), 500, "engine_error", {"x-should-retry": "false"}),
    (RuntimeError("x"), 500, "internal_error", {}),
]


@pytest.mark.parametrize(
    ("error", "status", "code", "headers"), ERRORS, ids=[type(case[0]).__name__ for case in ERRORS]
)
def test_every_error_has_its_answer(error: Exception, status: int, code: str | None, headers: dict[str, str]) -> None:
    found = to_api_error(error, "messages")
    assert (found.status_code, found.code, dict(found.headers or {})) == (status, code, headers)
    assert found.param == ("messages" if status == 400 else None)
    response = found.response()
    assert all(response.headers[name] == value for name, value in headers.items())
    assert json.loads(bytes(response.body))["error"]["code"] == code


def test_errors_keep_their_words() -> None:
    answer = ApiError(404, "not here", param="model", code="gone")
    assert to_api_error(answer, "messages") is answer
    found = to_api_error(FieldError("n", "n is wrong"), "messages")
    assert (found.status_code, found.detail, found.param) == (400, "n is wrong", "n")


def test_an_answer_is_short_whatever_the_client_sent() -> None:
    param, message = told(ChatCompletionRequest, {"messages": HELLO, "logit_bias": {"é" * 10**6: "a"}})
    assert param is not None and len(param) > 10**6
    error = json.loads(ApiError(400, message, param=param).body())["error"]
    assert (len(error["message"]), len(error["param"])) == (1000, 256)


class Inner(BaseModel):
    text: int
    str: int = 0
    Other: int = 0


class Branch(BaseModel):
    int: Inner | None = None
    json_schema: Inner | list[Inner] | None = None


def told(model: type[BaseModel], body: Any) -> tuple[str | None, str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    error = validation_error(errors, body)
    return error.param, str(error.detail)


HELLO = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        # fields that are named like what pydantic calls the branches of a union
        (Branch, {"int": {"text": "a"}}, "int.text"),
        (Branch, {"int": {"text": 1, "str": "a"}}, "int.str"),
        (Branch, {"int": {"text": 1, "Other": "a"}}, "int.Other"),
        (Branch, {"int": {}}, "int.text"),
        (Branch, {"json_schema": [{"text": 1}, {"text": "a"}]}, "json_schema[1].text"),
        # lists of several types: the one that is right up to the latest entry was meant
        (EmbeddingRequest, {"input": [[1], []]}, "input[1]"),
        (EmbeddingRequest, {"input": [1, "a"]}, "input[1]"),
        (EmbeddingRequest, {"input": ["a", 1]}, "input[1]"),
        (EmbeddingRequest, {"input": [[1], ["x"]]}, "input[1][0]"),
        (EmbeddingRequest, {"input": [[1, "b"]]}, "input[0][1]"),
        (ChatCompletionRequest, {}, "messages"),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            ChatCompletionRequest,
            {"messages": HELLO, "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        (
            ChatCompletionRequest,
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": 3}}},
            "response_format.json_schema.name",
        ),
        (
            ChatCompletionRequest,
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 3}}},
            "response_format.json_schema.schema",
        ),
        (ChatCompletionRequest, {"messages": HELLO, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (ChatCompletionRequest, {"messages": HELLO, "logit_bias": {"text": "a"}}, "logit_bias.text"),
    ],
)
def test_the_path_names_the_fields_and_no_branches(model: type[BaseModel], body: Any, param: str) -> None:
    found, message = told(model, body)
    assert found == param
    assert message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": ["a"]}, "messages[0]: input should be a JSON object"),
        ({"messages": HELLO, "tool_choice": 5}, None),
        ({"messages": HELLO, "functions": [1]}, "functions[0]: input should be a JSON object"),
        ({"messages": HELLO, "audio": {}}, "audio: this is not served: leave it out, or give null"),
        ({"messages": []}, "messages: list should have at least 1 item, not 0"),
        (
            {"messages": HELLO, "response_format": {"type": "jsn"}},
            "response_format: the type 'jsn' is none of 'text', 'json_object', 'json_schema', 'structural_tag', 'json', "
            "'regex', 'grammar'",
        ),
        ({"messages": HELLO, "response_format": {}}, 'response_format: the field "type" is required'),
        ({"messages": HELLO, "tools": [{"type": 1, "function": {}}]}, "tools[0].type: input should be 'function'"),
        (
            {"messages": HELLO, "tools": [{"type": 1, "function": {"name": "f"}}], "n": "a"},
            "tools[0].type: input should be 'function'; n: input should be a valid integer",
        ),
        (
            {"messages": HELLO, "tools": [], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
            "tool_choice.type: custom tools are not served: give a function with one parameter of type string",
        ),
        (
            {"messages": HELLO, "tools": [], "tool_choice": {"type": "web_search"}},
            "tool_choice.type: the server runs no tools: give a function that your program runs",
        ),
        (
            {"messages": HELLO, "tools": [], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.type: allowed_tools is not served: send only these tools, with tool_choice auto or required",
        ),
    ],
)
def test_messages_are_about_json(body: Any, expected: str | None) -> None:
    _, message = told(ChatCompletionRequest, body)
    assert "dictionary" not in message
    assert expected is None or set(message.split("; ")) == set(expected.split("; "))


def test_a_long_message_keeps_its_end() -> None:
    """A path into a deep schema is long, and what is wrong stands behind it."""
    message = json.loads(ApiError(400, "a" * 5000 + " is nested too deep").body())["error"]["message"]
    assert len(message) == 1000
    assert message.startswith("aaa")
    assert message.endswith(" is nested too deep")
    assert "…" in message
    assert json.loads(ApiError(400, "a" * 1000).body())["error"]["message"] == "a" * 1000


@pytest.mark.parametrize("prompt", ["x", [5]])
def test_too_many_prompts_are_told_as_such(prompt: object) -> None:
    param, message = told(CompletionRequest, {"prompt": [prompt] * 257})
    assert (param, message) == ("prompt", "prompt: list should have at most 256 items, not 257")
