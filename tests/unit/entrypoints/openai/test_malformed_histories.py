"""Histories with random faults, in all APIs: an answer, or one error that names a field; never a failure of the server."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from inflight.entrypoints.serve.settings import ServerSettings
from tests.unit.entrypoints.api_client import Api, serving

Path = tuple[Any, ...]  # Any: keys and numbers
F: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": ["x"]}}}}
TOOL = {"type": "function", "function": F}
USER = {"role": "user", "content": "q"}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    {"id": "c2", "type": "custom", "custom": {"name": "c", "input": "ls"}},
    {"id": "c3", "type": "web_search"},
]
RESULTS = [{"role": "tool", "tool_call_id": f"c{i}", "content": [{"type": "text", "text": "1"}]} for i in (1, 2, 3)]
OLDER = [{"role": "assistant", "function_call": {"name": "f", "arguments": {}}}, {"role": "function", "content": {}}]
THOUGHT = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "t"}],
    "refusal": "n",
    "audio": {"id": "x"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "tools": [TOOL, {"type": "custom", "custom": {"name": "c"}}],
        "messages": [
            USER, {"role": "assistant", "tool_calls": CALLS}, *RESULTS, *OLDER, THOUGHT, {"role": "critic", "content": "x"}
        ],
    },
    "/v1/responses": {
        "tools": [{"type": "function", **F}, {"type": "custom", "name": "c"}, {"type": "local_shell"}, {"type": "x"}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]},
            {"type": "custom_tool_call", "call_id": "b", "name": "c", "input": "ls"},
            {"type": "tool_search_call", "call_id": "t", "arguments": {}},
            {"type": "tool_search_output", "call_id": "t", "tools": [{"type": "function", **F}]},
            {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "l", "output": "1"},
            {"type": "mcp_call", "call_id": "m"},
        ],
    },
    "/v1/messages": {
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {}}, {"name": "g", "defer_loading": True}, {"type": "x", "name": "x"}],
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t"}, {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                {"type": "server_tool_use", "id": "b"}, {"type": "text", "text": "x"},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "g"}]},
                {"type": "document", "source": {"type": "text", "data": "d"}}, {"type": "text", "text": "x"},
            ]},
        ],
    },
    "/api/chat": {
        "stream": False,
        "tools": [TOOL, {"type": "x"}],
        "messages": [
            {**USER, "images": ["x"]},
            {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [*CALLS, {"function": {"name": "f"}}]},
            *({"role": "tool", **more, "content": "1"} for more in ({}, {"tool_name": "f"}, {"tool_call_id": "c1"})),
            USER,
        ],
    },
}  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 2.5, 1e308, "", "x", "\ud800", [], {}, [None], [{}], [[]], {"a": None}, {"type": "x"}, {"type": 5},
    [{"type": "text"}], [{"type": "text", "text": None}], "a" * 300, {"name": "f"}, [1, "a"], {"function": {}}, USER,
]  # fmt: skip
TYPES = ["unheard_of", "function", "text", "tool_use", "image", "message", "custom", "input_image", "thinking", None, 7]
NUM_CASES = 100


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    settings = ServerSettings(access_log="off", reasoning_parser="qwen3", tool_call_parser="hermes")
    with serving(settings, template="{% for m in messages %}{{ m.role[0] }}{% endfor %}") as made:
        made.core.texts = ("!",)
        yield made


def places(value: object, path: Path = ()) -> Iterator[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def damaged(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    found = deepcopy(body)
    for _ in range(draw.choice([1, 1, 2])):
        *way, last = draw.choice(list(places(found)))
        holder: Any = found
        for key in way:
            holder = holder[key]
        kind = draw.random()
        if kind < 0.6:
            holder[last] = deepcopy(draw.choice(VALUES))
        elif kind < 0.8:
            del holder[last]
        elif isinstance(holder, list):
            holder.insert(last, deepcopy(draw.choice([*VALUES, holder[last]])))
        else:
            holder["type"] = draw.choice(TYPES)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_faults_in_a_history(api: Api, path: str) -> None:
    assert api.post(path, BODIES[path]).status == 200
    draw = random.Random(1)
    num_refused = 0
    for _ in range(NUM_CASES):
        body = damaged(BODIES[path], draw)
        answer = api.post(path, body)
        assert answer.status in (200, 400), (answer.text, body)
        num_refused += answer.status == 400
        if answer.status == 400:
            error = answer.json["error"]
            message = error if isinstance(error, str) else error["message"]
            assert re.match(r"[a-z_]+(\[|\.|:| )", message), (message, body)
    assert 0 < num_refused < NUM_CASES


def test_an_error_names_the_message_although_others_are_left_out(api: Api) -> None:
    calls = [{"id": "w", "type": "web_search"}]
    left_out = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "w", "content": "1"}]
    answer = api.post("/v1/chat/completions", {"messages": [USER, *left_out, {"role": "user", "content": None}]})
    assert (answer.status, answer.error["param"]) == (400, "messages[3]"), json.dumps(answer.error)
