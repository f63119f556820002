"""Fields that are not known: taken out at every level, told within bounds, or refused."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from inflight.entrypoints.fields.messages import template_messages
from inflight.entrypoints.fields.offered_tools import plain_tools
from inflight.entrypoints.fields.strict_model import MAX_LOGGED_NAMES, MAX_NAME_LENGTH, MAX_NAMES, IgnoredFields
from inflight.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.unit.entrypoints.refusals import refused

TEXT_PART = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
    "extra_call": 1,
}
TOOL = {"type": "function", "function": {"name": "f", "returns": {"type": "string"}}, "cache_control": 1}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}, "extra_schema": 1}, "extra_format": 1}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [TEXT_PART]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL],
            "parsed": {"a": 1},
            "provider_specific_fields": {},
        },
        {"role": "assistant", "content": "x", "parsed": {"a": 2}, "absent": None},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f", "extra_name": 1}},
    "response_format": FORMAT,
    "stream_options": {"include_usage": True, "extra_option": 1},
    "structured_outputs": {"regex": "a", "extra_output": 1},
    "kv_transfer_params": {"max_load_tokens": 5, "do_remote_decode": True},
    "moderation": 1,
    "nothing": None,
}
CHAT_NAMES = {
    "moderation",
    "messages[].content[].cache_control",
    "messages[].tool_calls[].function.parsed_arguments",
    "messages[].tool_calls[].extra_call",
    "messages[].parsed",
    "messages[].provider_specific_fields",
    "tools[].function.returns",
    "tools[].cache_control",
    "tool_choice.extra_name".replace("choice", "choice.function"),
    "response_format.json_schema.extra_schema",
    "response_format.extra_format",
    "stream_options.extra_option",
    "structured_outputs.extra_output",
    "kv_transfer_params.do_remote_decode",
}


def test_they_are_taken_out_at_every_level() -> None:
    body = ChatCompletionRequest.model_validate(CHAT)
    fields = IgnoredFields(is_strict=False)
    assert set(fields.take_out(body)) == CHAT_NAMES
    assert fields.take_out(body) == []
    shown = f"{template_messages(body.messages)} {plain_tools(body.tools)}"  # what a template would see
    assert not any(name in shown for name in ("parsed", "cache_control", "returns", "extra", "provider", "absent"))
    assert (
        body.response_format is not None and "schema" in body.response_format.model_dump(by_alias=True)["json_schema"]
    )


@pytest.mark.parametrize(
    ("model", "body"),
    [(CompletionRequest, {"prompt": "x"}), (TokenizeRequest, {"prompt": "x"}), (DetokenizeRequest, {"tokens": [1]})],
)
def test_every_endpoint_has_them(model: Any, body: dict[str, Any]) -> None:
    assert IgnoredFields(is_strict=False).take_out(model.model_validate({**body, "odd": 1, "null": None})) == ["odd"]


def test_strict_fields_refuse_them_with_their_place() -> None:
    fields = IgnoredFields(is_strict=True)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "odd": 1}]}
    with refused("messages[1].odd"):
        fields.take_out(ChatCompletionRequest.model_validate(body))
    assert (
        fields.take_out(ChatCompletionRequest.model_validate({**body, "messages": [{"role": "user", "content": "x"}]}))
        == []
    )


def test_the_header_is_bounded_and_holds_nothing_that_could_end_it() -> None:
    fields = IgnoredFields(is_strict=False)
    assert fields.header([]) == {}
    ((name, value),) = fields.header(
        ["a\r\nSet-Cookie: b", "é,\x00", "", "tools[0] ('f'): #/not", "\ud800", "a\r\nSet-Cookie: b"]
    ).items()
    assert name == "X-Ignored-Fields"
    assert value == "a%0D%0ASet-Cookie: b, %C3%A9%2C%00, \"\", tools[0] ('f'): #/not, ?"
    ((_, value),) = fields.header(f"{i}" + "x" * 10_000 for i in range(1000)).items()
    assert value.endswith(", and more")
    assert len(value) < MAX_NAMES * (MAX_NAME_LENGTH + 2) + 30
    assert value.isascii() and value.isprintable()
    names = [f"name{i}" for i in range(MAX_NAMES)]
    assert fields.header(names) == {"X-Ignored-Fields": ", ".join(names)}
    assert fields.header([*names, "one more"]) == {"X-Ignored-Fields": ", ".join([*names, "and more"])}


def test_many_and_long_names_cost_little() -> None:
    parts = [{"type": "text", "text": "x", "x": 1}] * 40_000
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "é" * 2**20: 1}
    body |= {f"key{i}": 1 for i in range(50_000)}
    fields = IgnoredFields(is_strict=False)
    for _ in range(10):  # a garbage collection may take as long
        start = time.thread_time()
        model = ChatCompletionRequest.model_validate(body)
        middle = time.thread_time()
        names = fields.take_out(model)
        ((_, value),) = fields.header(names).items()
        if time.thread_time() - middle < 2 * (middle - start):
            break
    else:
        pytest.fail("it usually takes half of the time that the validation takes")
    assert len(names) == MAX_NAMES + 1
    assert value.endswith(", and more")
    assert len(value) < MAX_NAMES * (MAX_NAME_LENGTH + 2) + 30
    assert fields.take_out(model) == []


def test_the_log_names_each_once_and_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields(is_strict=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fields.header(["a\nb", "c"])
        assert [record.getMessage().split()[3].strip(",") for record in caplog.records] == ["a%0Ab", "c"]
        for i in range(2 * MAX_LOGGED_NAMES):
            fields.header([f"x{i}"])
        assert len(caplog.records) == MAX_LOGGED_NAMES
