"""Calls of older and other forms become calls of functions, and their results find them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.history.other_calls import as_tool_calls

Message = dict[str, Any]


def older(name: str, arguments: object = "{}") -> Message:
    return {"role": "assistant", "function_call": {"name": name, "arguments": arguments}}


def result(name: str | None, role: str = "function") -> Message:
    return {"role": role, "content": "r", **({} if name is None else {"name": name})}


def test_older_results_find_their_calls() -> None:
    given = [older("f"), result("f"), older("g"), older("f"), result("f"), result("g")]
    before = deepcopy(given)
    found = as_tool_calls(given)
    assert given == before
    ids = [found[i]["tool_calls"][0]["id"] for i in (0, 2, 3)]
    assert len(set(ids)) == 3 and all(len(each) == 9 and each.isalnum() for each in ids)
    assert [found[i]["tool_call_id"] for i in (1, 4, 5)] == [ids[0], ids[2], ids[1]]
    assert {message["role"] for message in found} == {"assistant", "tool"}
    # a prompt stays the same when messages are added
    for length in range(1, len(given)):
        assert as_tool_calls(given[:length]) == found[:length]


def test_a_result_without_its_call_has_no_id() -> None:
    assert as_tool_calls([result("f")]) == [result("f", "tool")]
    assert as_tool_calls([result(None)]) == [result(None, "tool")]


def test_a_result_of_the_older_role_answers_a_newer_call() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}
    found = as_tool_calls([{"role": "assistant", "tool_calls": [call]}, result("f")])
    assert found[0]["tool_calls"] == [call] and found[1]["tool_call_id"] == "x"


def test_a_call_in_both_forms_is_one_call() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    (found,) = as_tool_calls([{**older("f"), "tool_calls": [call]}])
    assert found == {"role": "assistant", "tool_calls": [call]}
    (found,) = as_tool_calls([{**older("g"), "tool_calls": [call]}])
    assert [each["function"]["name"] for each in found["tool_calls"]] == ["f", "g"]


def test_a_custom_call_is_a_function_with_one_argument() -> None:
    call = {"id": "x", "type": "custom", "custom": {"name": "f", "input": "ls"}}
    (found,) = as_tool_calls([{"role": "assistant", "tool_calls": [call]}])
    function = {"name": "f", "arguments": {"input": "ls"}}
    assert found["tool_calls"] == [{"id": "x", "type": "function", "function": function}]


@pytest.mark.parametrize("wrong", ["f", {}, {"name": 5}, [1]])
def test_a_malformed_call_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\['function_call'\]"):
        as_tool_calls([{"role": "assistant", "function_call": wrong}])


def test_an_older_result_may_be_any_json() -> None:
    """Also for LLM.chat, which has no models of messages."""
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"})
    for content, text in ((None, ""), ({"a": 1}, '{"a": 1}'), ([1], "[1]"), ("x", "x")):
        shown = template.render([{"role": "user", "content": "?"}, older("f"), {**result("f"), "content": content}])
        assert shown.endswith(f"{text};") and "None" not in shown and "function:" not in shown
