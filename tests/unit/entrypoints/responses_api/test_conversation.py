"""A request to /v1/responses as a chat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.messages import MAX_TOOLS
from inflight.entrypoints.http.chat_request import ChatRequest
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.response_store.responses import StoredResponses
from inflight.entrypoints.responses_api.conversation import ValidatedResponse, _read_chat, validate_response
from inflight.entrypoints.responses_api.kept import WholeInput
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.entrypoints.responses_api.tools import CalledTool, PromptTools
from inflight.entrypoints.serve.settings import NO_STORE, ServerSettings
from inflight.parsers.markup import default_markup
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.unit.entrypoints.openai.test_chat import server

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def chat(**body: Any) -> ChatRequest:
    asked = ResponsesRequest.model_validate({"input": "x", **body})
    tools = PromptTools(asked.tools or (), enforces_patterns=False)
    return _read_chat(server(), asked, tools, WholeInput(earlier=(), own=asked.input))


def messages(*items: Any, **more: Any) -> list[dict[str, Any]]:
    """The messages in the form that the chat template gets."""
    return [*chat(input=list(items), **more).prompt.messages]


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_text_is_a_message_of_the_user() -> None:
    found = chat(input="", instructions="Be short.").prompt.messages
    assert found == [{"role": "system", "content": "Be short."}, {"role": "user", "content": ""}]


@pytest.mark.parametrize("more", [{}, {"type": "message"}, {"type": None, "id": "msg_1", "status": "completed"}])
def test_a_message_needs_no_type_id_or_status(more: dict[str, Any]) -> None:
    assert messages({"role": "user", "content": "x", **more}) == [{"role": "user", "content": "x"}]


def test_parts_are_text() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
    ]
    assert messages({"role": "user", "content": parts}) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]


def test_developers_messages_stay_apart() -> None:
    found = messages(*({"role": "developer", "content": text} for text in "ab"), {"role": "user", "content": "c"})
    assert [(message["role"], message["content"]) for message in found] == [
        ("system", "a"), ("system", "b"), ("user", "c"),
    ]  # fmt: skip


def test_a_turn_of_the_assistant_is_one_message() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    second = {**CALL, "call_id": "c2", "name": "g", "namespace": "files"}
    found = messages(THOUGHT, said, CALL, second, RESULT, {**RESULT, "call_id": "c2"}, THOUGHT, {**CALL, "id": "fc_9"})
    assert found == [
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": [{"type": "text", "text": "I look."}],
            "tool_calls": [call("f", {"a": 1}), call("files__g", {"a": 1}, "c2")],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "tool", "content": "done", "tool_call_id": "c2"},
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call("f", {"a": 1})]},
    ]


def test_what_cannot_be_in_one_turn_begins_another() -> None:
    said = {"role": "assistant", "content": "a"}
    assert [message.get("content") for message in messages(said, said, CALL, said, THOUGHT)] == ["a", "a", "a", None]
    many = messages(*[CALL] * (MAX_TOOLS + 1))
    assert [len(message["tool_calls"]) for message in many] == [MAX_TOOLS, 1]


def test_reasoning_may_be_a_summary_or_have_no_text() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": None}
    sealed = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "ENC"}
    assert messages(sealed, {"role": "user", "content": "x"}) == [{"role": "user", "content": "x"}]
    assert messages(summary, sealed, {"role": "assistant", "content": "x"}) == [
        {"role": "assistant", "content": "x", "reasoning_content": "S"}
    ]


def test_a_custom_call_is_a_call_with_one_argument() -> None:
    made = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"', "namespace": "mcp__x__"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]}
    assert messages(made, result) == [
        {"role": "assistant", "tool_calls": [call("mcp__x__patch", {"input": 'a "b"'})]},
        {"role": "tool", "content": [{"type": "text", "text": "ok"}], "tool_call_id": "c1"},
    ]


def test_fields_have_their_names_of_a_chat() -> None:
    schema = {"type": "object"}
    found = chat(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "none", "summary": "auto"},
        max_output_tokens=3,
        temperature=0.5,
        stream=True,
        parallel_tool_calls=False,
    )
    assert found.params.structured_outputs == StructuredOutputsParams(json=schema)
    assert (found.thoughts.effort, found.params.max_tokens, found.params.temperature) == ("none", 3, 0.5)
    assert (found.presentation.stream, found.parallel_tool_calls, found.params.logprobs) == (True, False, None)
    assert chat(text={"verbosity": "low"}).params.structured_outputs is None
    wanted = StructuredOutputsParams(json_object=True)
    assert chat(text={"format": {"type": "json_object"}}).params.structured_outputs == wanted


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 2}, 2),
        ({"top_logprobs": 0, "include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_logprobs(body: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**body).params.logprobs == logprobs


def validated(body: dict[str, Any], *, strict_fields: bool = False, **parsers: Any) -> ValidatedResponse:
    one = server(**parsers)
    one.settings = ServerSettings(strict_fields=strict_fields)
    asked = ResponsesRequest.model_validate({"input": "x", **body})
    return asyncio.run(validate_response(one, asked, StoredResponses(ServerSettings(response_store=NO_STORE))))


def refusal(body: dict[str, Any], **settings: bool) -> Any:
    with pytest.raises((ApiError, FieldError)) as raised:
        validated(body, **settings)
    return raised.value


UNKNOWN = (
    "computer_call mcp_call mcp_list_tools mcp_approval_request compaction context_compaction compaction_trigger program "
    "configuration_update image_generation_call a.b unheard_of"
).split()


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_item_of_an_unknown_type_is_left_out_with_its_result(kind: str) -> None:
    other = {"type": kind, "id": "x_1", "call_id": "c9", "encrypted_content": "ENC", "tools": 5, "action": [{}]}
    result = {"type": "function_call_output", "call_id": "c9", "output": "lost"}
    question = {"role": "user", "content": "x"}
    for items in ([other, result, question], [question, other, result], [question, CALL, other, result, RESULT]):
        found = validated({"input": items})
        assert found.left_out == (f"input[] ({kind})", "input[] (function_call_output)")
        assert "lost" not in "".join(map(chr, found.prompts[0].token_ids))
    assert messages(other, {**CALL, "call_id": "c9"}, result)[1]["content"] == "lost"  # the call is there


@pytest.mark.parametrize(
    "wrong", [{"type": 5}, {"type": ["x"]}, {"type": "function_call", "call_id": "c"}, {"type": "message"}]
)
def test_a_wrong_item_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(input=[{"role": "user", "content": "x"}, wrong])


CLIENT_CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}, "user": None}},
        call("local_shell", {"command": ["ls"]}),
    ),
    ({"type": "shell_call", "action": {"commands": ["a"], "x": 9}}, call("shell", {"commands": ["a"], "x": 9})),
    (
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        call("apply_patch", {"type": "delete_file", "path": "a"}),
    ),
    ({"type": "tool_search_call", "execution": "client", "arguments": {"query": "a"}}, call("tool_search", {"query": "a"})),
    ({"type": "tool_search_call", "arguments": "mail"}, call("tool_search", {})),
    ({"type": "tool_search_call", "arguments": '{"query": "a"}'}, call("tool_search", {"query": "a"})),
]  # fmt: skip


@pytest.mark.parametrize(("item", "shown"), CLIENT_CALLS, ids=[case[0]["type"] for case in CLIENT_CALLS])
def test_a_call_of_a_clients_tool_is_a_call(item: dict[str, Any], shown: dict[str, Any]) -> None:
    """The model sees the arguments as it has written them."""
    output = {
        "type": item["type"].replace("search_call", "search_output").replace("_call", "_call_output"),
        "output": "ok",
    }
    for id_of_call, id_of_output in (
        ({"call_id": "c1"}, {"call_id": "c1"}),
        ({"id": "c1"}, {"id": "c1", "call_id": None}),
    ):
        assert messages({**item, **id_of_call}, {**output, **id_of_output}) == [
            {"role": "assistant", "tool_calls": [shown]},
            {"role": "tool", "content": "ok", "tool_call_id": "c1"},
        ]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"output": [{"stdout": "a", "outcome": {"type": "exit", "exit_code": 0}}]},
         '[{"stdout": "a", "outcome": {"type": "exit", "exit_code": 0}}]'),
        ({"status": "failed", "output": "no such file"}, "Error: no such file"),
        ({"status": "failed"}, "failed"),
        ({"status": "completed"}, "completed"),
        ({}, ""),
    ],
)  # fmt: skip
def test_the_result_of_a_clients_tool_is_text(output: dict[str, Any], text: str) -> None:
    found = messages({"type": "shell_call", "call_id": "c"}, {"type": "shell_call_output", "call_id": "c", **output})
    assert found[1]["content"] == text


def test_tools_that_are_found_can_be_called_and_are_defined_where_they_are_found() -> None:
    send = {"type": "function", "name": "send", "defer_loading": True}
    searched = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "mail"}}
    found = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "status": "completed",
             "tools": [{"type": "namespace", "name": "mcp__mail__", "tools": [send]}, {"type": "mcp"}]}  # fmt: skip
    items = [{"role": "user", "content": "x"}, searched, found]
    answered = validated({"input": items, "tools": [{"type": "function", "name": "f"}]}, tool="hermes")
    assert "".join(map(chr, answered.prompts[0].token_ids)) == (
        '[f]{"type": "function", "function": {"name": "mcp__mail__send"}}<think>'
    ), "the beginning of the prompt stays as it was"
    assert answered.tools.called("mcp__mail__send") == CalledTool("send", "mcp__mail__")
    assert answered.left_out == ("input[].tools[] (mcp)",)
    assert messages(searched, {**found, "tools": []})[1]["content"] == "No tool was found."
    # OpenAI's servers have searched: the search is left out, and the tools stay
    of_server = [{**item, "execution": "server", "call_id": None} for item in (searched, found)]
    answered = validated({"input": [*of_server, items[0]]}, tool="hermes")
    assert "".join(map(chr, answered.prompts[0].token_ids)) == "x<think>"
    assert answered.left_out[1:] == ("input[] (tool_search_call)", "input[] (tool_search_output)")
    assert answered.tools.called("mcp__mail__send") == CalledTool("send", "mcp__mail__")


IMAGE = {"type": "input_image", "image_url": "data:,"}
LEFT_OUT = "[image: left out, because this model reads text only]"


def test_a_picture_that_the_client_asks_about_is_an_error() -> None:
    error = refusal({"input": [{"role": "user", "content": [{"type": "input_text", "text": "?"}, IMAGE]}]})
    assert (error.param, "text only" in str(error)) == ("input[0].content[1].type", True)


def test_an_older_picture_and_one_of_a_tool_are_a_text() -> None:
    asked = {
        "role": "user",
        "content": [IMAGE, {"type": "input_text", "text": "?"}, {"type": "unheard_of", "text": "y"}],
    }
    result = {"type": "function_call_output", "call_id": "c1", "output": [IMAGE]}
    found = messages(asked, CALL, result, {"role": "user", "content": "And now?"})
    assert found[0]["content"] == [{"type": "text", "text": LEFT_OUT}, {"type": "text", "text": "?"}]
    assert found[2]["content"] == [{"type": "text", "text": LEFT_OUT}]
    answered = validated({"input": [asked, CALL, result, {"role": "user", "content": "And now?"}]})
    names = ("input[].content[] (input_image)", "input[].content[] (unheard_of)", "input[].output[] (input_image)")
    assert answered.left_out == names
    assert messages({"role": "user", "content": [{"type": "unheard_of"}]})[0]["content"] == ""


def test_thoughts_of_unknown_types_are_left_out() -> None:
    thought = {
        "type": "reasoning",
        "content": [{"type": "unheard_of", "text": "a"}, {"type": "reasoning_text", "text": "b"}],
    }
    assert messages(thought, {"role": "assistant", "content": "x"})[0]["reasoning_content"] == "b"


def test_a_server_that_stores_nothing() -> None:
    error = refusal({"previous_response_id": "resp_1"})
    assert (error.status_code, error.param, error.code) == (404, "previous_response_id", "previous_response_not_found")
    assert "stores no responses" in error.detail
    error = refusal({"background": True})
    assert error.param == "background" and "--response-store none" in str(error)
    error = refusal({"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]})
    assert (error.status_code, error.param) == (404, "input[1].id")


def test_input_without_a_message() -> None:
    error = refusal({"input": [{"type": "additional_tools", "tools": []}]})
    assert (error.param, str(error)) == ("input", "input has no message: add one")


def test_tools_come_from_items_too_and_what_is_not_served_is_named() -> None:
    tool = {"type": "function", "name": "f"}
    body = {
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": [{**tool, "name": "g"}, {"type": "web_search"}]},
            {"role": "user", "content": "x"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
            {"type": "item_reference", "id": "rs_1"},
        ],
        "tools": [tool, {"type": "image_generation", "size": "auto"}],
    }
    found = validated(body)
    assert "".join(map(chr, found.prompts[0].token_ids)) == "[fg]x<think>"
    assert found.left_out == (
        "tools[] (image_generation)", "tools[] (web_search)", "input[] (web_search_call)", "input[] (item_reference)",
    )  # fmt: skip
    assert validated(body, strict_fields=True).left_out == found.left_out  # they are tools, and not unknown fields


@pytest.mark.parametrize(
    ("parser", "enforces"),
    [("hermes", True), ("mistral", True), ("qwen3_coder", False), ("openai", False), (None, False)],
)
def test_a_regex_is_enforced_where_calls_are_json(parser: str | None, enforces: bool) -> None:
    tool = {"type": "custom", "name": "t", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    found = validated({"tools": [tool]}, tool=parser, markup=None if parser is None else default_markup(parser))
    assert (found.params.structured_outputs is not None) is enforces
    assert bool(found.left_out) is not enforces


def test_a_part_that_is_an_item_is_a_message() -> None:
    image = {"type": "input_image", "image_url": "data:"}
    answer = {"type": "output_text", "text": "a"}
    assert messages({"type": "input_text", "text": "q"}, answer, image, answer) == [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "[image: left out, because this model reads text only]"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
    ]
    with pytest.raises(FieldError) as refused:
        messages({"role": "user", "content": "q"}, image)
    assert refused.value.param.startswith("input[1]")


def test_a_part_of_a_thought_that_is_not_read_is_reported() -> None:
    parts = [{"type": "summary_text", "text": "S"}, {"type": "unheard_of", "text": "x"}]
    found = validated({"input": [{"type": "reasoning", "summary": parts}, {"role": "user", "content": "x"}]})
    assert found.left_out == ("input[].summary[] (unheard_of)",)
