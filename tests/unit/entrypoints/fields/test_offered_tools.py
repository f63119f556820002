"""Tools that the server can offer; what is left out; the older API's functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight.entrypoints.http.chat_request import ChatRequest
from inflight.entrypoints.openai.chat import read_chat
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.serve.settings import ServerSettings
from tests.unit.entrypoints.api_client import Api, serving
from tests.unit.entrypoints.openai.test_chat import server
from tests.unit.entrypoints.refusals import refused

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
F = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": F}
CUSTOM = {"type": "custom", "custom": {"name": "c", "format": {"type": "text"}}}
SEARCH = {"type": "web_search", "web_search": {"enable": True}}
NAMED = {"type": "function", "function": {"name": "f"}}


def offered(**fields: Any) -> ChatRequest:
    return read_chat(server(), ChatCompletionRequest.model_validate({**HELLO, **fields}))


def test_tools_that_are_no_functions_are_left_out() -> None:
    chat = offered(tools=[CUSTOM, TOOL, SEARCH])
    assert chat.prompt.tools == [TOOL] and chat.tool_choice == "auto"
    assert chat.left_out == ("tools[] (custom)", "tools[] (web_search)")
    chat = offered(tools=[CUSTOM])
    assert (chat.left_out, chat.tool_choice) == (("tools[] (custom)",), "none")


def test_a_type_of_a_tool_may_be_left_out() -> None:
    for tool in ({"function": F}, {"type": None, "function": F}):
        chat = offered(tools=[tool])
        assert not chat.left_out and chat.prompt.tools


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [CUSTOM], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [CUSTOM, TOOL], "tool_choice": {"type": "function", "function": {"name": "c"}}}, "tool_choice"),
        ({"tools": [CUSTOM], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [F], "function_call": {"name": "g"}}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [F], "tools": [{"type": "function", "function": {"name": "g"}}]}, "functions"),
        ({"functions": [F], "function_call": "none", "tool_choice": "auto"}, "function_call"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(fields: dict[str, Any], param: str) -> None:
    with refused(param):
        offered(**fields)


@pytest.mark.parametrize(
    ("given", "choice"), [(None, "auto"), ("auto", "auto"), ("none", "none"), ({"name": "f"}, {"name": "f"})]
)
def test_functions_are_tools(given: Any, choice: Any) -> None:
    chat = offered(functions=[F], function_call=given)
    assert chat.prompt.tools == [TOOL] and not chat.left_out
    assert chat.tool_choice == choice and not chat.parallel_tool_calls and chat.presentation.has_older_calls
    assert offered(functions=[], function_call="auto").tool_choice == "none"


def test_a_client_that_sends_both_knows_the_newer_api() -> None:
    chat = offered(functions=[F], tools=[TOOL], function_call={"name": "f"}, tool_choice=NAMED)
    assert not chat.presentation.has_older_calls and chat.tool_choice == {"name": "f"}


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving(ServerSettings(access_log="off", tool_call_parser="hermes")) as made:
        made.core.texts = (CALL + CALL,)
        yield made


def test_the_answer_has_the_older_form(api: Api) -> None:
    asked = {**HELLO, "functions": [F], "max_tokens": 190}
    (choice,) = api.post("/v1/chat/completions", asked).json["choices"]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "function_call" and choice["message"]["function_call"] == function
    assert choice["message"]["content"] is None and "tool_calls" not in choice["message"]
    events = api.post("/v1/chat/completions", {**asked, "stream": True}).events
    deltas = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
    assert {key: "".join(delta.get(key, "") for delta in deltas) for key in function} == function
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/tokenize"])
def test_tools_are_an_open_list_in_all_apis(api: Api, path: str) -> None:
    answer = api.post(path, {**HELLO, "tools": [CUSTOM, TOOL, SEARCH]})
    assert answer.status == 200, answer.text
    assert answer.headers["x-ignored-fields"].startswith("tools[] (custom), tools[] (web_search)")
    wrong = api.post(path, {**HELLO, "tools": [{"type": 5, "function": F}]})
    assert wrong.status == 400 and "tools[0].type" in wrong.text


def test_a_choice_of_a_custom_tool_is_refused(api: Api) -> None:
    choice = {"type": "custom", "custom": {"name": "c"}}
    answer = api.post("/v1/chat/completions", {**HELLO, "tools": [CUSTOM, TOOL], "tool_choice": choice})
    assert answer.status == 400 and answer.error["param"].startswith("tool_choice")
