"""What the model cannot read of a history does not end the conversation: it is left out, or becomes text, and is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.entrypoints.fields.images import RequestImages
from inflight.entrypoints.fields.messages import template_messages
from inflight.entrypoints.fields.readable_history import make_readable
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from tests.unit.entrypoints.api_client import MODEL, Api, serving
from tests.unit.entrypoints.refusals import refused

# a line of JSON for each message
TEMPLATE = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
USER = {"role": "user", "content": "?"}
ASKED = {"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}


def readable(*messages: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """What the template gets, and the names of what is left out."""
    body = ChatCompletionRequest.model_validate({"messages": list(messages)})
    found, left_out = make_readable(body.messages, RequestImages(are_read=False))
    return template_messages(found), left_out


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([ASKED], "messages[0].content[1].type"),
        ([CALLED, ASKED], "messages[1].content[1].type"),
        ([ASKED, CALLED], ""),
        ([CALLED, {"role": "tool", "content": [IMAGE]}], ""),
        ([{"role": "assistant", "content": [IMAGE]}], ""),
    ],
)
def test_a_medium_is_an_error_where_the_client_asks_about_it(messages: list[dict[str, Any]], param: str) -> None:
    if param:
        with refused(param):
            readable(*messages)
    else:
        shown, left_out = readable(*messages)
        assert left_out == ["messages[].content[] (image_url)"] and "[image: left out" in str(shown)


def test_a_message_of_unknown_parts_only_is_empty() -> None:
    shown, left_out = readable({"role": "user", "content": [{"type": "unheard_of"}]})
    assert left_out == ["messages[].content[] (unheard_of)"] and shown == [{"role": "user", "content": ""}]


def test_a_call_of_another_type_is_left_out_with_its_result() -> None:
    calls = [{"id": "w", "type": "web_search", "web_search": {"q": 1}}, {"id": "c", "function": {"name": "f"}}]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "21"} for each in calls]
    shown, left_out = readable(USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results)
    assert left_out == ["messages[].tool_calls[] (web_search)", "messages[] (tool)"]
    assert [message["role"] for message in shown] == ["user", "assistant", "tool"]
    assert [call["id"] for call in shown[1]["tool_calls"]] == ["c"] and shown[2]["tool_call_id"] == "c"


def test_a_call_with_a_function_is_a_call_whatever_its_type() -> None:
    for kind in ("function", "tool", "", None):
        shown, left_out = readable({"role": "assistant", "tool_calls": [{"type": kind, "function": {"name": "f"}}]})
        assert shown[0]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
        assert not left_out


def test_a_message_without_content_has_another_text() -> None:
    assert readable({"role": "assistant", "refusal": "No."}) == ([{"role": "assistant", "content": "No."}], [])
    audio = {"id": "a", "transcript": "Hello."}
    assert readable({"role": "assistant", "audio": audio}) == (
        [{"role": "assistant", "content": "Hello."}],
        ["messages[].audio"],
    )
    [shown], left_out = readable({"role": "assistant", "content": None, "audio": {"id": "a"}})
    assert shown["content"].startswith("[audio") and left_out == ["messages[].audio"]
    said = {"role": "assistant", "content": "Yes.", "refusal": "No.", "audio": audio}
    assert readable(said) == ([{"role": "assistant", "content": "Yes."}], [])


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving(template=TEMPLATE) as made:
        yield made


OLDER: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
    {"role": "function", "name": "f", "content": "21"},
]
CUSTOM: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "f", "input": "ls"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "21"},
]


@pytest.mark.parametrize(("messages", "arguments"), [(OLDER, {"a": 1}), (CUSTOM, {"input": "ls"})])
def test_calls_in_other_forms_are_calls_of_functions(
    api: Api, messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> None:
    answer = api.post("/tokenize", {"messages": messages})
    assert answer.status == 200 and "x-ignored-fields" not in answer.headers
    prompt = bytes(token for token in answer.json["tokens"] if token < 256).decode()  # each token is a byte
    _, called, result = map(json.loads, prompt.splitlines())
    (call,) = called["tool_calls"]
    assert call["type"] == "function" and call["function"] == {"name": "f", "arguments": arguments}
    assert result["role"] == "tool" and result["tool_call_id"] == call["id"]


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        ("/v1/chat/completions", [{"id": "w", "type": "web_search"}]),
        ("/api/chat", [{"id": "w", "type": "web_search"}]),
        ("/api/chat", [{"type": "web_search"}]),
    ],
)
def test_no_call_ends_a_conversation_in_any_api(api: Api, path: str, calls: list[dict[str, Any]]) -> None:
    result = {"role": "tool", "content": "21", **({"tool_call_id": "w"} if "id" in calls[0] else {})}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, result, USER]
    answer = api.post(path, {"model": MODEL, "messages": messages})
    assert answer.status == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "messages[].tool_calls[] (web_search), messages[] (tool)"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [{"type": 5}]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].custom"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "function_call": "f"}, "messages[0].function_call"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "messages[0].function_call.name"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(api: Api, message: dict[str, Any], param: str) -> None:
    answer = api.post("/v1/chat/completions", {"messages": [message]})
    assert answer.status == 400 and answer.error["param"] == param
