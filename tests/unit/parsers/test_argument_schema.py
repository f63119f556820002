"""What a tool's schema says of an argument that comes as plain text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.parsers.argument_schema import ArgumentSchema

ALL = {"null", "boolean", "integer", "number", "string", "array", "object"}
NUMBER = {"integer", "number"}


def of(parameters: dict[str, Any]) -> ArgumentSchema:
    tools = [{"type": "function", "function": {"name": "g"}}, {"name": "f", "parameters": parameters}]
    return ArgumentSchema.of_tool("f", tools)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ALL),
        (True, {"string"}),
        ({"type": "string"}, {"string"}),
        ({"type": "number"}, NUMBER),
        ({"type": ["integer", "null", 3]}, {"integer", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"const": 1}, NUMBER),
        ({"const": 1.5}, {"number"}),
        ({"enum": [True, "a", None]}, {"boolean", "string", "null"}),
        ({"type": "string", "enum": ["a", 1]}, {"string"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "object"}, {"const": "x"}]}, {"object", "string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"$ref": "#/$defs/s"}, {"string"}),
        ({"$ref": "#/$defs/none", "type": "integer"}, {"integer"}),
        ({"$ref": "#/$defs/self"}, ALL),
        ({"type": "string", "allOf": [{"type": "integer"}]}, ALL),  # no value fits
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    definitions = {"s": {"type": "string"}, "self": {"$ref": "#/$defs/self"}}
    assert of({"properties": {"a": schema}, "$defs": definitions}).argument("a").types == types


def test_which_schema_is_that_of_an_argument() -> None:
    schema = of(
        {
            "properties": {"a": {"type": "integer"}},
            "patternProperties": {"^b": {"type": "boolean"}, "c$": {"type": "null"}},
            "additionalProperties": {"type": "array", "items": {"type": "number"}},
            "allOf": [{"properties": {"d": {"type": "object"}}}],
        }
    )
    assert schema.names() == {"a", "d"}
    found = {name: schema.argument(name).types for name in ("a", "bx", "bc", "e")}
    assert found == {"a": {"integer"}, "bx": {"boolean"}, "bc": {"boolean", "null"}, "e": {"array"}}
    assert schema.argument("e").item().types == NUMBER
    assert schema.argument("a").item().types == {"string"}
    items = {"items": {"type": "null"}, "allOf": [{"items": {"type": "integer"}}]}
    assert of({"properties": {"a": items}}).argument("a").item().types == {"null"}
    assert of({"$ref": "#", "properties": {"a": {}}}).names() == {"a"}, "each part once"
    assert of({"properties": {"a": {}}}).argument("b").types == {"string"}
    assert of({"additionalProperties": False}).argument("b").types == {"string"}
    assert ArgumentSchema.of_tool("h", [{"name": "f", "parameters": {"properties": {"a": {}}}}]).names() == set()


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "integer"}, "1", 1),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "integer"]}, "1", "1"),
        ({}, "1", 1),
        ({}, "a b", "a b"),
        ({"anyOf": [{"type": "integer"}, {"enum": ["x"]}]}, "1", 1),
        ({"anyOf": [{"type": "integer"}, {"enum": ["x"]}]}, "x", "x"),
        ({"anyOf": [{"type": "integer"}, {"const": "x"}]}, "2", 2),
        ({"anyOf": [{"type": "integer"}, {"enum": ["x"]}]}, "y", "y"),  # nothing fits
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/x"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/x"}]}, "x", "x"),
        ({"allOf": [{"enum": [1, "x", "y"]}, {"enum": [1, "x"]}]}, "1", 1),
        ({"allOf": [{"enum": [1, "x", "y"]}, {"enum": [1, "x"]}]}, "x", "x"),
        ({"nullable": True, "enum": ["x", 2]}, "2", 2),
        ({"nullable": True, "enum": ["x", 2]}, "null", None),
        ({"enum": ["x", 1], "allOf": [{"$ref": "#/properties/a"}]}, "1", 1),  # it refers to itself
    ],
)
def test_text_as_json(schema: Any, text: str, value: object) -> None:
    schema = of({"properties": {"a": schema}, "$defs": {"x": {"type": "string", "enum": ["x"]}}}).argument("a")
    assert json.loads(schema.read_text(text)) == value
    assert type(json.loads(schema.read_text(text))) is type(value)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, " TRUE ", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "integer"}, "1", 1),
        ({"type": "string"}, "1", "1"),
        ({"type": ["string", "integer"]}, "1", 1),
        ({"type": "integer"}, "abc", "abc"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"nullable": True, "type": "string"}, "null", None),
        ({"type": "number"}, "2.0", 2.0),
        ({"type": "integer"}, "[1]", [1]),  # nothing fits
    ],
)
def test_words_as_json(schema: Any, text: str, value: object) -> None:
    assert json.loads(of({"properties": {"a": schema}}).argument("a").read_word(text)) == value
    assert json.loads(ArgumentSchema().read_word("true")) is True
    assert of({"properties": {"a": {"type": "string"}}}).argument("a").read_text("ü") == '"ü"'
