"""What a chat template may get: plain JSON, and messages in one form."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.tokenizer.messages import check_messages, check_objects, check_template_kwargs, plain_json
from tests.support.refusals import refused


class Color(enum.StrEnum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Size(float):
    pass


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Color.RED, "red"),
        (Number.ONE, 1),
        (Size(1.5), 1.5),
        (True, True),
        (None, None),
        ((1, "a"), [1, "a"]),
        (OrderedDict(a=[UserDict({Color.RED: Size(2)})]), {"a": [{"red": 2.0}]}),
    ],
)
def test_a_copy_of_plain_data(value: Any, plain: Any) -> None:
    def kinds(value: Any) -> Any:
        if isinstance(value, dict):
            return [type(value), *((type(key), kinds(each)) for key, each in value.items())]
        return [type(value), *map(kinds, value)] if isinstance(value, list) else type(value)

    found = plain_json(value, "x")
    assert found == plain
    assert kinds(found) == kinds(plain)


def test_a_copy_shares_nothing() -> None:
    given: dict[str, Any] = {"a": [{"b": 1}]}
    found = plain_json(given, "x")
    found["a"][0]["b"] = 2
    assert given == {"a": [{"b": 1}]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, object()]}, r"x\['a'\]\[1\] is a object; only JSON data"),
        ([float("nan")], r"x\[0\] is nan"),
        (float("inf"), "x is inf"),
        ({"a": {1: 2}}, r"x\['a'\] has the key 1; keys must be strings"),
        ({1, 2}, "x is a set"),
        (b"a", "x is a bytes"),
    ],
)
def test_what_is_not_plain(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        plain_json(value, "x")


@pytest.mark.parametrize("is_list", [False, True])
def test_how_deep_data_may_be(is_list: bool) -> None:
    value: Any = 1
    for _ in range(64):
        value = [value] if is_list else {"a": value}
    assert plain_json(value, "x") == value
    with pytest.raises(InvalidRequestError, match="is nested more than 64 deep"):
        plain_json([value] if is_list else {"a": value}, "x")


def test_tools_and_documents() -> None:
    assert check_objects(None, "tools", "a schema") is None
    assert check_objects(({"a": (1,)},), "tools", "a schema") == [{"a": [1]}]
    for value, message in (
        ("ab", "tools is a str; give a list in which each entry is a schema"),
        (b"ab", "tools is a bytes"),
        ({"a": 1}, "tools is a dict"),
        ([{}, "b"], r"tools\[1\] is a str; it must be a schema"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            check_objects(value, "tools", "a schema")


def test_variables() -> None:
    assert check_template_kwargs(None) == {}
    assert check_template_kwargs({"a": (Color.RED,)}) == {"a": ["red"]}
    with refused("chat_template_kwargs", "documents, tools"):
        check_template_kwargs({"tools": [], "documents": [], "a": 1})
    with pytest.raises(InvalidRequestError, match=r"chat_template_kwargs\['a'\]\['b'\] is a set"):
        check_template_kwargs({"a": {"b": set()}})


TEXT = {"type": "text", "text": "x"}
THOUGHT = {"type": "thinking", "thinking": "hm"}


@pytest.mark.parametrize(
    ("message", "checked"),
    [
        ({"role": "user", "content": "a", "name": None}, {"role": "user", "content": "a"}),
        ({"role": "tool", "content": None, "tool_call_id": "i"}, {"role": "tool", "content": "", "tool_call_id": "i"}),
        ({"role": "tool"}, {"role": "tool", "content": ""}),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant"}),
        ({"role": "assistant", "tool_calls": [{"a": 1}]}, {"role": "assistant", "tool_calls": [{"a": 1}]}),
        ({"role": "user", "content": (TEXT,)}, {"role": "user", "content": [TEXT]}),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": [TEXT, TEXT], "closed": True}, TEXT]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "xx"}, TEXT]},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "r", "thinking": None},
            {"role": "assistant", "content": "a", "reasoning": "r", "thinking": "r", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "r", "thinking": "t"},
            {"role": "assistant", "content": "a", "reasoning": "r", "thinking": "t", "reasoning_content": "t"},
        ),
        (
            {"role": "assistant", "content": "a", "thinking": "t", "reasoning_content": "c"},
            {"role": "assistant", "content": "a", "thinking": "t", "reasoning_content": "c"},
        ),
    ],
)
def test_messages(message: dict[str, Any], checked: dict[str, Any]) -> None:
    assert check_messages([message]) == [checked]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is a str, not a dict"),
        ([{"content": "a"}], r"messages\[0\] has role=None"),
        ([{"role": "", "content": "a"}], "has role=''"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\] \(role 'user'\) has no content"),
        ([{"role": "user", "content": 1}], r"messages\[0\]\['content'\] is a int; it must be text"),
        ([{"role": "user", "content": ["a"]}], r"\['content'\]\[0\] is of type 'str'"),
        ([{"role": "user", "content": [TEXT, {"type": "image"}]}], r"\['content'\]\[1\] is of type 'image'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "without a string 'text'"),
        ([{"role": "user", "content": [THOUGHT]}], "is of type 'thinking'"),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], "without a text or a list of text parts"),
        ([{"role": "assistant", "content": [{**THOUGHT, "thinking": [THOUGHT]}]}], r"\['thinking'\]\[0\] is of type"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_messages(messages)
