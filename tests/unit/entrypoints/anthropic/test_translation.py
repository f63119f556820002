"""What a request to /v1/messages means as a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from inflight.entrypoints.anthropic.translation import read_messages
from inflight.entrypoints.fields.messages import MAX_MESSAGES, MAX_TOOLS
from inflight.entrypoints.fields.strict_model import IgnoredFields
from inflight.entrypoints.http.chat_request import ChatRequest
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.entrypoints.anthropic.recordings import IGNORED, RECORDED
from tests.unit.entrypoints.openai.test_chat import server
from tests.unit.entrypoints.refusals import refused

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
SEARCH: dict[str, Any] = {"name": "search", "input_schema": {"type": "object"}}
# writes tools, messages with thoughts and calls
CHATML = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
)
NO_LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


def translated(messages: list[Any] = HELLO, *, kwargs: dict[str, Any] | None = None, **more: Any) -> ChatRequest:
    body = MessagesRequest.model_validate({"messages": messages, "max_tokens": 9, **more})
    return read_messages(with_defaults(kwargs), body)


def with_defaults(kwargs: dict[str, Any] | None = None) -> Any:
    return server(ServerSettings(default_chat_template_kwargs=kwargs))


def chat_messages(messages: list[Any], **more: Any) -> list[dict[str, Any]]:
    return [*translated(messages, **more).prompt.messages]


def prompt_of(found: ChatRequest, source: str = CHATML) -> str:
    tools = [tool for tool in found.prompt.tools if tool["function"]["name"] not in found.hidden_tools]
    template = ChatTemplate({"default": source})
    return template.render(found.prompt.messages, tools=tools, add_generation_prompt=False)


def test_the_fields_of_sampling() -> None:
    more: dict[str, Any] = {"stop_sequences": ["a"], "temperature": 0.5, "top_p": 0.5, "top_k": 3, "stream": True}
    chat = translated(**more)
    params = chat.params
    found = (params.max_tokens, params.stop, params.temperature, params.top_p, params.top_k)
    assert found == (9, ("a",), 0.5, 0.5, 3)
    assert (chat.presentation.stream, chat.presentation.model) == (True, "first")


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("Be kind.", "Be kind."),
        ([{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be short."}], "Be kind.\nBe short."),
        ([{"type": "text", "text": "x-anthropic-billing-header: cc=1;"}, {"type": "text", "text": "Hi"}], "Hi"),
        ("x-anthropic-billing-header: cc=1;\n\nHi", "Hi"),
        ("x-anthropic-billing-header: cc=1;", None),
        ([], None),
        (None, None),
    ],
)
def test_the_system_text(system: Any, text: str | None) -> None:
    *before, last = chat_messages(HELLO, system=system)
    assert last == {"role": "user", "content": "Hello"}
    assert before == ([] if text is None else [{"role": "system", "content": text}])


def test_blocks_and_a_string_are_the_same_text_at_the_same_place() -> None:
    """Claude Code sends its second message as blocks in the first turn, and as a string later."""
    blocks = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "S", "cache_control": {"type": "x"}}]}]
    string = [*HELLO, {"role": "system", "content": "S"}]
    assert chat_messages(blocks) == chat_messages(string) == string


def test_a_call_its_result_and_the_thought_before() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain"}]}
    text = {"type": "text", "text": "And now?"}
    turns: list[tuple[list[Any], str | None]] = [
        ([thought, call], None),
        ([hidden, thought, call], None),
        ([thought, {"type": "text", "text": "So:"}, call], "So:"),
    ]
    for blocks, said in turns:
        history = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": [text, result]}]
        _, answer, tool, user = chat_messages(history)
        function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
        assert answer["tool_calls"] == [{"id": "toolu_1", "type": "function", "function": function}]
        assert (answer["reasoning_content"], answer.get("content")) == ("Hm.", said)
        assert tool == {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain"}
        assert user == {"role": "user", "content": "And now?"}


@pytest.mark.parametrize(
    ("content", "is_error", "text"),
    [("no", True, "Error: no"), ("no", False, "no"), (None, None, ""), ([], True, "Error: "), ("", None, "")],
)
def test_what_a_tool_has_returned(content: Any, is_error: bool | None, text: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": is_error}
    _, tool = chat_messages([*HELLO, {"role": "user", "content": [block]}])
    assert tool["content"] == text


@pytest.mark.parametrize(
    ("choice", "tool_choice", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "get_weather"}, {"name": "get_weather"}, True),
    ],
)
def test_tool_choice(choice: Any, tool_choice: Any, parallel: bool) -> None:
    found = translated(tools=[WEATHER], tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == (tool_choice, parallel)


def test_tools_have_only_the_fields_that_are_given() -> None:
    found = translated(tools=[WEATHER, {**SEARCH, "type": "custom", "strict": True, "eager_input_streaming": True}])
    function = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
    strict = {"name": "search", "parameters": {"type": "object"}, "strict": True}
    assert [tool["function"] for tool in found.prompt.tools] == [function, strict]
    assert (found.hidden_tools, found.left_out) == (frozenset(), ())


def test_tools_that_anthropic_runs_are_left_out_and_told() -> None:
    found = translated(tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}])
    assert [tool["function"]["name"] for tool in found.prompt.tools] == ["get_weather"]
    assert found.left_out == ("tools[] (web_search_20250305)",)


def test_a_deferred_tool_is_written_where_it_is_referred_to() -> None:
    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    unknown = {"type": "tool_reference", "tool_name": "unknown"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "search", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [reference, unknown]}
    tools = [{**WEATHER, "defer_loading": True}, SEARCH, {"name": "never", "defer_loading": True}]
    before = translated([*HELLO, call], tools=tools)
    after = translated([*HELLO, call, {"role": "user", "content": [result]}], tools=tools)
    assert prompt_of(after).startswith(prompt_of(before))
    assert "never" not in prompt_of(after)
    definition, name = after.prompt.messages[-1]["content"].split("\n")
    function = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
    assert (json.loads(definition), name) == ({"type": "function", "function": function}, "unknown")
    # the parser and the grammar know it
    assert [tool["function"]["name"] for tool in after.prompt.tools] == ["search", "get_weather"]
    assert after.hidden_tools == {"get_weather"}


ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("thinking", "defaults", "switches", "shows"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, None, ON, True),
        ({"type": "adaptive", "display": "omitted"}, None, ON, True),
        ({"type": "disabled"}, {"enable_thinking": True}, OFF, False),
        (None, None, OFF, False),
        (None, ON, {}, True),  # the user of the server has decided
        (None, {"enable_thinking": True}, {"thinking": False}, True),
        (None, OFF, {}, False),
        (None, {"other": True}, OFF, False),
    ],
)
def test_thinking(thinking: Any, defaults: Any, switches: dict[str, bool], shows: bool) -> None:
    found = translated(thinking=thinking, kwargs=defaults)
    assert (found.prompt.variables, found.presentation.reasoning) == (switches, shows)


@pytest.mark.parametrize("newer", [False, True])
def test_effort_and_format(newer: bool) -> None:
    given = {"type": "json_schema", "schema": SCHEMA}
    more: dict[str, Any] = {"output_config": {"effort": "high", "format": given}} if newer else {"output_format": given}
    chat = translated(**more)
    assert chat.thoughts.effort == ("high" if newer else None)
    params = chat.params.structured_outputs
    assert params is not None and json.loads(str(params.json)) == SCHEMA and params.lenient


def test_an_answer_that_has_begun_is_continued() -> None:
    def continues(content: Any) -> bool:
        return translated([*HELLO, {"role": "assistant", "content": content}]).prompt.continue_final_message

    assert continues("I") is continues([{"type": "text", "text": "I"}]) is True
    assert continues([CALL]) is continues("") is False
    assert translated().prompt.continue_final_message is False


def test_a_named_choice_needs_a_name() -> None:
    with refused("tool_choice.name"):
        translated(tool_choice={"type": "tool"})


@pytest.mark.parametrize("name", RECORDED)
def test_no_field_of_a_recorded_request_is_refused(name: str) -> None:
    recorded = RECORDED[name]
    model = CountTokensRequest if "count_tokens" in recorded["path"] else MessagesRequest
    body = model.model_validate(recorded["body"])
    assert set(IgnoredFields(is_strict=False).take_out(body)) <= IGNORED
    prompt = prompt_of(read_messages(with_defaults(), body))
    assert "billing" not in prompt and "cache_control" not in prompt and "signature" not in prompt


@pytest.mark.parametrize("source", [CHATML, NO_LATE_SYSTEM + CHATML], ids=["late system", "no late system"])
@pytest.mark.parametrize(
    ("first", "second"), [("claude.tool.02", "claude.tool.03"), ("claude.search.02", "claude.search.03")]
)
def test_the_next_turn_of_a_recorded_conversation_begins_with_the_turn_before(
    source: str, first: str, second: str
) -> None:
    before, after = (
        prompt_of(read_messages(with_defaults(), MessagesRequest.model_validate(RECORDED[name]["body"])), source)
        for name in (first, second)
    )
    assert after.startswith(before) and len(after) > len(before)
    assert before.count("# Environment") == 1, "its system message keeps its place"


def test_tools_of_the_messages_never_end_the_conversation() -> None:
    definition = {"input_schema": {"type": "object"}}
    blocks = [
        {
            "type": "tool_addition",
            "tool": {"type": "custom", "name": f"f{i}", "definition": {"name": f"f{i}", **definition}},
        }
        for i in range(MAX_TOOLS + 5)
    ]
    found = translated([{"role": "user", "content": blocks}], tools=[{"name": "f", **definition}])
    names = [tool["function"]["name"] for tool in found.prompt.tools]
    assert names == ["f", *(f"f{i}" for i in range(6, MAX_TOOLS + 5))]
    assert found.hidden_tools == set(names[1:]) and found.left_out == ("messages[].content[] (tool_addition)",)
    assert all(f'"f{i}"' in found.prompt.messages[0]["content"] for i in range(MAX_TOOLS + 5))


@pytest.mark.parametrize(
    "messages",
    [
        [
            *HELLO * (MAX_MESSAGES - 1),
            {"role": "assistant", "content": [CALL, {"type": "tool_result", "tool_use_id": "1"}]},
        ],
        [*HELLO, {"role": "assistant", "content": [CALL] * (MAX_TOOLS + 1)}],
    ],
    ids=["messages", "calls"],
)
def test_too_many(messages: list[Any]) -> None:
    """A message of this API may be several of the chat."""
    with refused("messages"):
        translated(messages)
