"""No character of a line of JSON is a line break for any client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic_core import PydanticSerializationError

from inflight.entrypoints.http.presenter import to_json_in_slices
from inflight.entrypoints.json_lines import row_to_json, to_json
from inflight.entrypoints.serve.settings import ServerSettings
from tests.unit.entrypoints.api_client import serving

# all characters at which `str.splitlines` cuts, and some neighbours
TEXT = "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029b \x84\x86\xa8\u2027\u202a\ufeff\x7f é日🙂"


@pytest.mark.parametrize("encode", [to_json, row_to_json, to_json_in_slices])
def test_json_has_one_line(encode: object) -> None:
    value = {TEXT: [TEXT, {"x": TEXT}], "plain": "p"}
    text = encode(value).decode("utf-8")  # type: ignore[operator]
    assert len(text.splitlines()) == 1
    assert json.loads(text) == value
    assert "é日🙂" in text


def test_infinite_numbers_and_surrogates() -> None:
    assert to_json([float("inf")], inf_nan_mode="null") == b"[null]"
    with pytest.raises(PydanticSerializationError):
        to_json("\ud800")
    assert json.loads(row_to_json({"a": "\ud800"})) == {"a": "\ud800"}


CHAT: dict[str, object] = {"messages": [{"role": "user", "content": TEXT}]}
# path -> the body of a request
ASKED: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {**CHAT, "logprobs": True, "top_logprobs": 1},
    "/v1/completions": {"prompt": TEXT, "echo": True, "logprobs": 1},
    "/v1/responses": {"input": TEXT, "instructions": TEXT, "metadata": {TEXT: TEXT}, "user": TEXT},
    "/v1/messages": {**CHAT, "model": "played", "max_tokens": 99},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": TEXT, "system": TEXT},
}


@pytest.mark.parametrize("stream", [True, False])
def test_all_apis_write_lines_that_every_client_reads(stream: bool) -> None:
    said = "a\x85b\u2028c\u2029d"
    with serving() as api:
        api.core.texts = [said]
        for path, body in ASKED.items():
            answer = api.post(path, {**body, "stream": stream})
            assert answer.status == 200, answer.text
            assert answer.text.splitlines() == answer.text.removesuffix("\n").split("\n")
            assert said in "".join(texts_of(answer.text))
        wrong = api.post("/v1/chat/completions", {**CHAT, "model": TEXT})
        assert wrong.status == 404 and len(wrong.text.splitlines()) == 1


THOUGHT = "t\x85\u2028\u2029t"
# a call with the three characters as they are, an escaped one, and half of a character in a name and in a text
CALL = '{"name": "f", "arguments": {"k\x85\\ud83d": "v\u2028\u2029\\u2028\\udc00", "n": "\\ud83d\\ude42"}}'
ARGUMENTS = {"k\x85\ufffd": "v\u2028\u2029\u2028\ufffd", "n": "🙂"}
TOOL: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {"type": "function", "function": TOOL}
WITH_TOOLS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {**CHAT, "tools": [FUNCTION]},
    "/v1/responses": {"input": TEXT, "tools": [{"type": "function", **TOOL}]},
    "/v1/messages": {
        **CHAT,
        "max_tokens": 190,
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
        "thinking": {"type": "enabled"},
    },
    "/api/chat": {**CHAT, "tools": [FUNCTION]},
}


@pytest.mark.parametrize("stream", [True, False])
def test_thoughts_and_calls_arrive_in_one_line(stream: bool) -> None:
    settings = ServerSettings(access_log="off", reasoning_parser="qwen3", tool_call_parser="hermes")
    with serving(settings, template="{% for m in messages %}{{ m.role }}{% endfor %}") as api:
        api.core.texts = [f"<think>{THOUGHT}</think><tool_call>{CALL}</tool_call>"]
        for path, body in WITH_TOOLS.items():
            answer = api.post(path, {**body, "stream": stream})
            assert answer.status == 200, answer.text
            assert answer.text.splitlines() == answer.text.removesuffix("\n").split("\n")
            assert not re.search(r"\\ud[89a-f]", answer.text.replace("\\\\ud83d\\\\ude42", ""))
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
            parsed = [json.loads(line) for line in lines if line.startswith("{")]
            assert THOUGHT in "".join(values(parsed, "reasoning_content", "thinking", "text", "delta"))
            given = [each for each in values(parsed, "arguments", "input", "partial_json") if each]
            whole = given[-1] if isinstance(given[-1], dict) or path == "/v1/responses" else "".join(given)
            assert (whole if isinstance(whole, dict) else json.loads(whole)) == ARGUMENTS


@pytest.mark.parametrize("stream", [True, False])
def test_half_of_a_character_in_a_request_is_replaced_in_its_answer(stream: bool) -> None:
    half = "a\ud83d"
    with serving() as api:
        for path, body in ASKED.items():
            told: dict[str, object] = (
                {"prompt": half} if "prompt" in body else {"messages": [{"role": "user", "content": half}]}
            )
            if path == "/v1/responses":
                told = {"input": half, "metadata": {half: half}, "user": half, "instructions": half}
            answer = api.post(path, {**body, **told, "stream": stream})
            assert answer.status == 200, answer.text
            assert "\\ud83d" not in answer.text
            if path == "/v1/responses":
                assert "a\ufffd" in answer.text


def values(value: object, *names: str) -> Iterator[Any]:
    """The members with one of these names, at any depth."""
    if isinstance(value, list):
        for item in value:
            yield from values(item, *names)
    if isinstance(value, dict):
        for name, item in value.items():
            if (
                name in names
                and isinstance(item, str | dict)
                and (isinstance(item, str) or name in ("arguments", "input"))
            ):
                yield item
            else:
                yield from values(item, *names)


def texts_of(answer: str) -> list[str]:
    """The texts of an answer, which are in members with different names."""
    found = re.findall(r'"(?:content|text|delta|response)":("(?:[^"\\]|\\.)*")', answer)
    return [json.loads(each) for each in found]
