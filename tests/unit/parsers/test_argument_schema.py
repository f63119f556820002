"""`ArgumentSchema`: which types an argument may have, which schema it has, and how its text is read."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.repair_budget import RepairBudget

ALL = {"null", "boolean", "integer", "number", "string", "array", "object"}
NUMBER = {"integer", "number"}


def schema(node: Any, **definitions: Any) -> ArgumentSchema:
    return ArgumentSchema(node, {"$defs": definitions})


def nested(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        node = {"allOf": [node]}
    return node


@pytest.mark.parametrize(
    ("node", "types"),
    [
        (None, {"string"}),
        ({}, ALL),
        ({"type": "string"}, {"string"}),
        ({"type": "integer"}, {"integer"}),
        ({"type": "number"}, NUMBER),
        ({"type": ["string", "null", 3]}, {"string", "null"}),
        ({"type": ["number", "array"]}, {*NUMBER, "array"}),
        ({"type": "date"}, ALL),
        ({"const": 5}, NUMBER),
        ({"const": 5.0}, NUMBER),
        ({"const": 5.5}, {"number"}),
        ({"const": True}, {"boolean"}),
        ({"const": None}, {"null"}),
        ({"const": ["a"]}, {"array"}),
        ({"const": {"a": 1}}, {"object"}),
        ({"enum": ["a", 1.5, False]}, {"string", "number", "boolean"}),
        ({"enum": []}, ALL),
        ({"enum": "ab"}, ALL),
        ({"type": ["string", "null"], "enum": ["a", 1]}, {"string"}),
        ({"type": "string", "const": 1}, ALL),
        ({"const": "a", "enum": ["a", 1]}, {"string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string", "integer"}),
        ({"oneOf": [{"type": "array"}, {"type": "null"}]}, {"array", "null"}),
        (
            {"anyOf": [{"type": "string"}, {"type": "integer"}], "oneOf": [{"type": "integer"}, {"type": "null"}]},
            {"integer"},
        ),
        ({"anyOf": [True, {"type": "string"}]}, ALL),
        ({"type": ["string", "array"], "anyOf": [{"type": "string"}]}, {"string"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "string", "nullable": 1}, {"string"}),
        ({"$ref": "#/$defs/names"}, {"array"}),
        ({"$ref": "#/$defs/names", "type": ["array", "string"]}, {"array"}),
        ({"$ref": "#/$defs/missing"}, ALL),
        ({"$ref": "elsewhere.json"}, ALL),
        ({"$ref": 3, "type": "string"}, {"string"}),
        ({"$ref": "#/$defs/itself"}, {"object"}),
        (nested(16), {"string"}),
        (nested(17), ALL),
    ],
)
def test_the_types_that_a_schema_allows(node: Any, types: set[str]) -> None:
    itself = {"type": "object", "anyOf": [{"$ref": "#/$defs/itself"}, {"type": "null"}]}
    found = schema(node, names={"type": "array"}, itself=itself)
    assert found.types == types
    assert found.types == types, "asked again"


COLOURS = {"anyOf": [{"enum": ["red", "null"]}, {"type": "integer"}]}


@pytest.mark.parametrize(
    ("node", "text", "as_text", "as_word"),
    [
        (None, "5", '"5"', "5"),
        ({}, "5", "5", "5"),
        ({}, "é", '"é"', '"é"'),
        ({"type": "string"}, "10001", '"10001"', '"10001"'),
        ({"type": "string"}, "null", '"null"', '"null"'),
        ({"type": "string"}, "é", '"é"', '"é"'),
        ({"type": "integer"}, "10001", "10001", "10001"),
        ({"type": "integer"}, "five", '"five"', '"five"'),
        ({"type": "integer"}, "1.5", "1.5", "1.5"),
        ({"type": ["string", "integer"]}, "5", '"5"', "5"),
        ({"type": ["string", "integer"]}, "5.5", '"5.5"', '"5.5"'),
        ({"type": ["string", "null"]}, "null", "null", "null"),
        ({"type": ["string", "null"]}, "None", "null", "null"),
        ({"type": ["string", "null"]}, "none", '"none"', '"none"'),
        (COLOURS, "5", "5", "5"),
        (COLOURS, "red", '"red"', '"red"'),
        (COLOURS, "null", '"null"', '"null"'),
        (COLOURS, "5.5", '"5.5"', '"5.5"'),
        ({"enum": ["1", 2]}, "1", '"1"', '"1"'),
        ({"enum": ["1", 2]}, "2", "2", "2"),
        ({"type": ["string", "integer"], "const": 2}, "2", "2", "2"),
        ({"allOf": [{"type": ["string", "integer"]}, {"enum": ["a", 7]}]}, "7", "7", "7"),
        ({"allOf": [{"type": ["string", "integer"]}, {"enum": ["a", 7]}]}, "8", '"8"', '"8"'),
        ({"oneOf": [{"const": "a"}, {"$ref": "#/$defs/seven"}]}, "7", "7", "7"),
        ({"oneOf": [{"const": "a"}, {"$ref": "#/$defs/seven"}]}, "8", '"8"', '"8"'),
        ({"enum": ["a", "b"], "nullable": True}, "null", "null", "null"),
        ({"enum": ["a", 1], "nullable": True}, "1", "1", "1"),
        ({"type": "boolean"}, "TRUE", "true", "true"),
        ({"type": "boolean"}, " False ", "false", "false"),
        ({"type": "boolean"}, "yes", '"yes"', '"yes"'),
        ({"type": ["boolean", "string"]}, "TRUE", '"TRUE"', '"TRUE"'),
        ({"type": ["boolean", "string"]}, "True", '"True"', "true"),
    ],
)
def test_how_a_text_is_read(node: Any, text: str, as_text: str, as_word: str) -> None:
    """With and without quotes around strings in the family's markup."""
    found = schema(node, seven={"const": 7})
    assert found.read_word(text) == as_word
    assert found.read_text(text) == as_text


def test_names_and_schemas_of_arguments() -> None:
    root = {
        "properties": {"a": {"type": "integer"}, "ref": {"$ref": "#/$defs/list"}, "x-both": {"type": "null"}},
        "patternProperties": {"^x-": {"type": "boolean"}, "^x-t": {"type": "array"}},
        "additionalProperties": {"type": "number"},
        "allOf": [{"properties": {"b": {"type": "string"}}}, {"$ref": "#/$defs/more"}],
        "anyOf": [{"properties": {"c": {"type": "object"}}}],
        "oneOf": [{"properties": {"a": {"type": "array"}}}, {"properties": 3}],
        "$defs": {"list": {"type": "array", "items": {"type": "integer"}}, "more": {"properties": {"d": {}}}},
    }
    found = ArgumentSchema(root, root)
    assert found.names() == {"a", "b", "c", "d", "ref", "x-both"}
    assert found.argument("a").types == {"integer", "array"}, "any of the two"
    assert found.argument("x-both").types == {"null", "boolean"}
    assert found.argument("x-one").types == {"boolean"}
    assert found.argument("x-two").types == {"boolean", "array"}
    assert found.argument("other").types == NUMBER
    assert found.argument("ref").types == {"array"}
    assert found.argument("ref").item().types == {"integer"}
    assert found.argument("a").item().types == {"string"}, "it says nothing of items"


def test_an_argument_that_the_tool_does_not_have_is_a_string() -> None:
    nodes: list[Any] = [None, {}, {"additionalProperties": True}, {"properties": {"b": {}}}, {"properties": ["a"]}]
    for node in nodes:
        assert ArgumentSchema(node, node).argument("a").types == {"string"}
    assert ArgumentSchema({"properties": {"a": {}}}).argument("a").types == ALL


@pytest.mark.parametrize(
    ("name", "types"), [("first", {"integer"}), ("bare", {"array"}), ("empty", {"string"}), ("absent", {"string"})]
)
def test_the_schema_of_a_tool(name: str, types: set[str]) -> None:
    """Its references are paths from its parameters, also if it has names for its parts."""
    number = {"$anchor": "number", "type": "integer"}
    parameters = {"properties": {"a": {"$ref": "#number"}}, "$defs": {"number": number}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": "broken"},
        {"type": "function", "function": {"name": "empty"}},
        {"type": "function", "function": {"name": "first", "parameters": parameters}},
        {"name": "bare", "parameters": {"properties": {"a": {"type": "array"}}}},
        {"type": "function", "function": {"name": "first", "parameters": {}}},
    ]
    assert ArgumentSchema.of_tool(name, tools, RepairBudget()).argument("a").types == types
