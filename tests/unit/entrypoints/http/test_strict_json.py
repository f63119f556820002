"""Bodies that are JSON, that Python would take for JSON, and that are too large."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from typing import Any

import pytest

from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.strict_json import MAX_KEYS, MAX_VALUES, parse_json


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": [1, -0.5, "\xc3\xa9", null]}', {"a": [1, -0.5, "é", None]}),
        (BOM_UTF8 + b'{"a": 1}', {"a": 1}),
        (b'{"a": "\\ud83d\\ude42", "b": "\\uD83D\\uDE42"}', {"a": "🙂", "b": "🙂"}),  # both halves
        (b'["a\\ud800", "\\uD800\\\\ud800"]', ["a\ufffd", "\ufffd\\ud800"]),
        (b'{"\\udfff": {"x": "\\ud83d\\ude42\\ud83d"}}', {"\ufffd": {"x": "🙂\ufffd"}}),
        (b'"' + b",[{" * MAX_VALUES + b'"', ",[{" * MAX_VALUES),  # no values, but text
        (b"[" + b"1," * (MAX_VALUES - 1) + b"1]", [1] * MAX_VALUES),
    ],
    ids="values BOM pairs lone-surrogates lone-in-a-key long-text as-many-values-as-are-allowed".split(),
)
def test_json_is_parsed(body: bytes, value: Any) -> None:
    assert parse_json(body) == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "at line 1, column 2"),
        (b'"\xff"', "byte 1 is not UTF-8"),
        (BOM_UTF8 * 2 + b"1", "not valid JSON"),
        (b"NaN", "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b'{"\\ud800": 1, "\\udfff": 1}', "the key '\ufffd' twice"),
        (b'{"b": {"a": 1, "c": 1, "a": 1}}', "the key 'a' twice"),
        (b"[" * 20_000, "nested too deeply"),
        (b"9" * 5_000, "a number in it is too long"),
    ],
)
def test_what_is_no_json_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_json(body)
    assert why in str(error.value.detail)
    assert (error.value.status_code, error.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" + b"1," * MAX_VALUES + b"1]", f"more than {MAX_VALUES} values"),
        (b"{" + b",".join(b'"%d": 1' % i for i in range(MAX_KEYS + 1)) + b"}", f"{MAX_KEYS + 1} keys"),
    ],
    ids=["values", "keys"],
)
def test_too_many_values_are_refused(body: bytes, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        parse_json(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["a", "\ud800"]}, "stop[1]"),
        ({"guided_json": {"enum": ["a", "\ud800"]}}, "guided_json.enum[1]"),
        ({"format": {"properties": {"\ud800": {}}}}, "format.properties"),
        ({"text": {"format": {"schema": {"const": "\ud800"}}}}, "text.format.schema.const"),
        (
            {"response_format": {"json_schema": {"schema": {"pattern": "\ud800"}}}},
            "response_format.json_schema.schema.pattern",
        ),
        (
            {"output_config": {"format": {"schema": {"required": ["\ud800"]}}}},
            "output_config.format.schema.required[0]",
        ),
        (
            {"tools": [{"function": {"parameters": {"properties": {"a": {"enum": ["\ud800"]}}}}}]},
            "tools[0].function.parameters.properties.a.enum[0]",
        ),
        ({"options": {"guided_choice": ["\ud800"]}}, "options.guided_choice[0]"),
        ({"options": {"stop": "\ud800"}}, "options.stop"),
        ({"structured_outputs": {"choice": ["\udc00"]}}, "structured_outputs.choice[0]"),
        ({"messages": ["\ud800"], "cache_salt": "\ud800"}, "cache_salt"),
    ],
)
def test_an_exact_text_has_no_lone_surrogate(body: Any, param: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_json(json.dumps(body).encode())
    assert (error.value.status_code, error.value.param) == (400, param)


def test_descriptions_may_be_damaged() -> None:
    """Programs cut them as they cut other texts. A property may have the name of a description."""
    tool = {
        "description": "\ud800",
        "parameters": {"title": "\ud800", "properties": {"title": {"description": "\ud800"}}},
    }
    body = json.dumps(
        {"tools": [{"function": tool}], "guided_json": {"description": "\ud800"}, "reasoning_effort": "\ud800"}
    )
    assert parse_json(body.encode()) == json.loads(body.replace("\\ud800", "\ufffd"))
    with pytest.raises(ApiError):
        parse_json(json.dumps({"format": {"properties": {"title": {"enum": ["\ud800"]}}}}).encode())


def test_an_object_may_have_as_many_keys_as_are_allowed() -> None:
    assert len(parse_json(b"{" + b",".join(b'"%d": 1' % i for i in range(MAX_KEYS)) + b"}")) == MAX_KEYS
