"""Which field of a request an error of the engine is about, in each API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.openai.chat import chat_names
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.errors import ContextLengthExceededError, ErrorKind, InvalidRequestError, OverloadedError, TokenizerError
from tests.unit.entrypoints.api_client import SETTINGS, Api, serving

HELLO = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("param", "given", "expected"),
    [
        ("min_tokens", {"min_tokens": 10}, "min_tokens"),
        ("min_tokens", {}, None),  # the model's own default: no field of the request
        ("logit_bias[5]", {"logit_bias": {"5": 1}}, "logit_bias[5]"),
        ("messages[0]", {}, "messages[0]"),
        ("messages[1]['tool_calls'][0]['x']", {}, "messages[1].tool_calls[0].x"),
        ("messages[1]['tool_calls'][0]['x y']", {}, "messages[1].tool_calls[0]"),
        ("tools[0]", {"tools": TOOLS}, "tools[0]"),
        ("prompt", {}, "messages"),
        ("min_tokens", {"options": {"min_tokens": 3}}, "options.min_tokens"),
        ("logit_bias[5]", {"options": {"logit_bias": {"5": 1}}}, "options.logit_bias[5]"),
        ("json", {"response_format": {"type": "json_object"}}, "response_format"),
        ("json", {"guided_json": {}}, "guided_json"),
        ("response_format", {"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ("response_format", {"options": {"format": "json"}}, "options.format"),
        ("regex", {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("structural_tag", {"tools": TOOLS}, "tools"),
        ("", {"logprobs": True}, None),
        ("\N{PILE OF POO}", {}, None),
    ],
)
def test_the_field_that_means_a_parameter(param: str, given: dict[str, Any], expected: str | None) -> None:
    names = chat_names(ChatCompletionRequest.model_validate({"messages": HELLO, **given}))
    assert (
        names.api_error(InvalidRequestError("max_tokens: what a message says does not count", param)).param == expected
    )


def test_errors_of_one_field() -> None:
    names = FieldNames(ChatCompletionRequest.model_validate({"messages": HELLO}))
    assert names.api_error(ContextLengthExceededError("x")).param == "messages"
    assert names.api_error(TokenizerError("x")).param is None
    assert names.api_error(FieldError("own.field", "x")).param == "own.field"
    assert names.api_error(OverloadedError("x", retry_after_seconds=1)).param is None


def test_other_names_and_numbers() -> None:
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "tools": TOOLS})
    names = FieldNames(body, prompt="input")
    for param, field in (("messages[1]", "input"), ("prompt", "input"), ("tools[0]", "tools")):
        assert names.api_error(InvalidRequestError("x", param)).param == field


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as made:
        yield made


SCHEMA: dict[str, Any] = {"type": "object"}
# how each API says that the text is JSON: the fields, and the path of the field in an error
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format",
    ),
    "/v1/completions": ({"prompt": "x", "guided_json": SCHEMA}, "guided_json"),
    "/v1/responses": (
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        "text.format",
    ),
    "/v1/messages": (
        {"messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format",
    ),
    "/api/chat": ({"messages": HELLO, "format": SCHEMA}, "format"),
    "/api/generate": ({"prompt": "x", "options": {"format": SCHEMA}}, "options.format"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", FORMS)
def test_a_grammar_that_fails_late_is_told_in_the_words_of_the_api(api: Api, path: str, stream: bool) -> None:
    """The engine core compiles it when the request runs. A stream of some APIs has begun then."""
    body, field = FORMS[path]
    subject = "json" if field == "guided_json" else "response_format"
    api.core.forget()
    api.core.held = True
    exchange = api.open(path, {**body, "stream": stream})
    exchange.until(lambda: api.core.sequences)
    if stream:
        api.do(lambda: api.core.emit(0, "a"))
        exchange.until(lambda: exchange.answer.status)
    api.do(lambda: api.core.fail(0, f"{subject}: #/x is wrong", ErrorKind.REQUEST, subject))
    answer = exchange.end()
    api.core.held = False
    assert answer.status == (200 if stream else 400)
    assert field in answer.text and "#/x is wrong" in answer.text
    assert field == "response_format" or "response_format" not in answer.text


def test_the_field_that_is_read_is_named_if_there_are_several(api: Api) -> None:
    body = {"input": "x", "text": {"format": {"type": "json_object"}}, "structured_outputs": {}}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        assert api.post(path, body).error["param"] == "structured_outputs"


# the server finds in it how calls are written, so that a grammar can describe them
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"
    '{% if tools %}<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
)


@pytest.fixture(scope="module")
def with_calls() -> Iterator[Api]:
    with serving(replace(SETTINGS, tool_call_parser="hermes"), template=TEMPLATE) as made:
        yield made


F: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
BAD: dict[str, Any] = {**F, "name": "a b", "strict": True}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
# the bad function in the words of each API, behind a tool that is left out, and its field
NUMBERED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": HELLO, "tools": [SEARCH, {"type": "function", "function": BAD}]}, "tools[1]"),
    ("/v1/chat/completions", {"messages": HELLO, "functions": [F, BAD]}, "functions[1]"),
    ("/v1/responses", {"input": "x", "tools": [SEARCH, {"type": "function", **BAD}]}, "tools[1]"),
    (
        "/v1/messages",
        {
            "messages": HELLO,
            "tools": [SEARCH, {"name": "later", "defer_loading": True}, {"name": "a b", "strict": True}],
        },
        "tools[2]",
    ),
    ("/api/chat", {"messages": HELLO, "tools": [SEARCH, {"type": "function", "function": BAD}]}, "tools[1]"),
]


@pytest.mark.parametrize(("path", "body", "field"), NUMBERED)
def test_a_wrong_function_has_the_number_that_it_has_in_the_request(
    with_calls: Api, path: str, body: dict[str, Any], field: str
) -> None:
    answer = with_calls.post(path, body)
    assert answer.status == 400
    assert f"{field} " in answer.text, "the sentence names it, too: some APIs have no member for the field"
    if isinstance(answer.error, dict) and "param" in answer.error:
        assert answer.error["param"] == field
