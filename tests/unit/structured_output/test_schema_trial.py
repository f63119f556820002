"""What is left out of a schema that a library refuses, and which schemas have no value. The library here is a function."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.structured_output import schema_trial
from inflight.structured_output.json_schema import subschemas
from inflight.structured_output.schema_trial import MAX_FOUND, find_refused, leave_out_refused, never_ends
from inflight.structured_output.spec import SchemaPart
from tests.support.schema_generator import texts

WHOLE = [SchemaPart("#", "format", is_strict=False)]


def refuses_patterns(schema: object) -> str:
    """Names the first pattern, as a library does that stops at the first problem."""
    return next((f"pattern {node['pattern']}" for _, node in subschemas(schema) if "pattern" in node), "")


def refuses_any_pattern(schema: object) -> str:
    """Says the same of all patterns, so no single keyword explains it if there are two in a part."""
    return "a pattern" if refuses_patterns(schema) else ""


def two_tools(
    first: dict[str, Any] | bool, second: dict[str, Any], *, strict: tuple[bool, ...] = (False, False)
) -> Any:
    parts = [SchemaPart(f"#/properties/{i}", f"tools[{i}]", is_strict) for i, is_strict in enumerate(strict)]
    return {"properties": {"0": first, "1": second}}, parts


def patterns(names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "title": "t", "properties": {name: {"pattern": name} for name in names}, **more}


def test_each_refused_keyword_is_left_out_and_all_others_stay_in_order() -> None:
    schema = patterns("ab", required=["b"])
    schema["properties"]["a"] = {"minLength": 1, "pattern": "a", "maxLength": 2}
    told = texts(leave_out_refused(schema, refuses_patterns, WHOLE, "json"))
    assert sorted(told) == ["format: #/properties/a/pattern", "format: #/properties/b/pattern"]
    expected = patterns("ab", required=["b"])
    expected["properties"] = {"a": {"minLength": 1, "maxLength": 2}, "b": {}}
    assert json.dumps(schema) == json.dumps(expected)


@pytest.mark.parametrize(
    ("holder", "path"),
    [
        ({"type": "array", "items": {"pattern": "a", "minLength": 1}}, "#/items"),
        ({"anyOf": [{"minLength": 1, "pattern": "a"}, {"type": "null"}]}, "#/anyOf/0"),
        ({"additionalProperties": {"pattern": "a"}}, "#/additionalProperties"),
        (
            {"properties": {"x": {"prefixItems": [{"allOf": [{"pattern": "a"}]}]}}},
            "#/properties/x/prefixItems/0/allOf/0",
        ),
    ],
)
def test_what_holds_the_refused_keyword_stays(holder: dict[str, Any], path: str) -> None:
    expected = json.loads(
        json.dumps(holder).replace('"pattern": "a", ', "").replace(', "pattern": "a"', "").replace('"pattern": "a"', "")
    )
    assert texts(leave_out_refused(holder, refuses_patterns, WHOLE, "json")) == [f"format: {path}/pattern"]
    assert holder == expected


def test_lenient_parts_of_a_strict_list_are_relaxed() -> None:
    """As in calls that are written as a list. The list itself stays, also if no keyword of a part explains it."""
    parts = [SchemaPart(f"#/items/anyOf/{i}", f"tools[{i}]", is_strict=False) for i in range(2)]
    tools = {"properties": {"x": {"pattern": "a"}}, "type": "object"}, {"type": "object"}
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": [*tools]}}
    assert texts(leave_out_refused(schema, refuses_patterns, parts, "json")) == ["tools[0]: #/properties/x/pattern"]
    assert schema == {"type": "array", "items": {"anyOf": [{"properties": {"x": {}}, "type": "object"}, tools[1]]}}
    both = {"type": "object", "properties": {"x": {"pattern": "a", "allOf": [{"pattern": "a"}]}}}
    schema["items"]["anyOf"][0] = both
    assert texts(leave_out_refused(schema, refuses_any_pattern, parts, "json")) == ["tools[0]: #"]
    assert schema == {"type": "array", "items": {"anyOf": [{"type": "object"}, tools[1]]}}


def test_a_reference_into_what_was_left_out_is_left_out_too() -> None:
    """While it leads nowhere, the library says so, and the schema cannot be read to its end."""

    def refuses(schema: object) -> str:
        found = json.dumps(schema)
        return "two patterns" if found.count('"pattern"') > 1 else "a lost reference" if '"$ref"' in found else ""

    bad = {"anyOf": [{"pattern": "a"}, {"pattern": "b"}, {"pattern": "c"}]}
    schema: dict[str, Any] = {"properties": {"a": bad, "b": {"$ref": "#/properties/a/anyOf/0"}}}
    told = texts(leave_out_refused(schema, refuses, WHOLE, "json"))
    assert told == ["format: #/properties/a/anyOf", "format: #/properties/b/$ref"]
    assert schema == {"properties": {"a": {}, "b": {}}}


def test_a_large_schema_loses_no_more_than_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guilty keyword does not hold is not tried."""
    schema = {"properties": {str(i): {"minLength": 1} for i in range(50)}, "patternProperties": {"(?!a)": {}}}
    monkeypatch.setattr(schema_trial, "MAX_TRIED_CHARACTERS", 10 * len(json.dumps(schema)))
    told = texts(leave_out_refused(schema, lambda given: str("(?!a)" in json.dumps(given) or ""), WHOLE, "json"))
    assert told == ["format: #/patternProperties"] and len(schema["properties"]) == 50


def test_a_search_that_finds_nothing_changes_nothing() -> None:
    schema = patterns("ab", required=["b"], additionalProperties=False)
    before = json.dumps(schema)
    assert find_refused(schema, lambda _: "always", "always") == ("", None, "")
    path, node, keyword = find_refused(schema, lambda schema: str("required" in json.dumps(schema)), "True")
    assert (path, keyword) == ("#", "required") and node is schema
    assert json.dumps(schema) == before


def test_what_a_strict_part_has_stays() -> None:
    for lenient, told in ((False, []), (True, ["tools[1]: #/pattern"])):
        schema, parts = two_tools(patterns("a"), {"pattern": "b"}, strict=(True, not lenient))
        assert texts(leave_out_refused(schema, refuses_patterns, parts, "json")) == told
        assert schema["properties"] == {"0": patterns("a"), "1": {} if lenient else {"pattern": "b"}}
    schema, parts = two_tools({"pattern": "a"}, {}, strict=(False, True))
    assert texts(leave_out_refused(schema, refuses_patterns, parts, "json")) == ["tools[0]: #/pattern"]
    assert schema["properties"] == {"0": {}, "1": {}}
    schema, parts = two_tools({"pattern": "a"}, {})
    schema["pattern"] = "of no part"
    assert leave_out_refused(schema, refuses_patterns, parts, "json") == []
    assert schema["pattern"] == "of no part"
    assert leave_out_refused({"pattern": "a"}, refuses_patterns, (), "json") == []


def test_additional_properties_are_left_out_with_pattern_properties() -> None:
    """Without the patterns, `additionalProperties` would refuse what they admitted."""

    def refuses(schema: object) -> str:
        return str("patternProperties" in json.dumps(schema)).replace("False", "")

    schema = {"patternProperties": {"^a": {}}, "additionalProperties": False, "required": ["a"]}
    told = texts(leave_out_refused(schema, refuses, WHOLE, "json"))
    assert told == ["format: #/patternProperties", "format: #/additionalProperties"]
    assert schema == {"required": ["a"]}
    schema = {"patternProperties": {"^a": {}}, "required": ["a"]}
    assert texts(leave_out_refused(schema, refuses, WHOLE, "json")) == ["format: #/patternProperties"]


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_part_that_no_keyword_explains_is_emptied_but_for_its_type(guilty: int) -> None:
    innocent = {"required": ["x"], "type": "object", "minProperties": 1}
    tools = [innocent, patterns("ab")] if guilty else [patterns("ab"), innocent]
    schema, parts = two_tools(tools[0], tools[1])
    assert texts(leave_out_refused(schema, refuses_any_pattern, parts, "json")) == [f"tools[{guilty}]: #"]
    assert schema["properties"][str(guilty)] == {"type": "object"}
    assert json.dumps(schema["properties"][str(1 - guilty)]) == json.dumps(innocent)


@pytest.mark.parametrize("kind", [None, ["object", "null"]])
def test_a_part_without_one_type_becomes_empty(kind: object) -> None:
    schema = patterns("ab", type=kind)
    assert texts(leave_out_refused(schema, refuses_any_pattern, WHOLE, "json")) == ["format: #"]
    assert schema == {}


def test_strict_parts_and_parts_that_are_true_or_false_are_not_changed() -> None:
    schema, parts = two_tools(True, patterns("ab"))
    assert texts(leave_out_refused(schema, refuses_any_pattern, parts, "json")) == ["tools[1]: #"]
    assert schema["properties"] == {"0": True, "1": {"type": "object"}}
    schema, parts = two_tools(patterns("ab"), patterns("cd"), strict=(True, False))
    assert leave_out_refused(schema, refuses_any_pattern, parts, "json") == []
    assert schema["properties"] == {"0": patterns("ab"), "1": patterns("cd")}


def test_what_no_part_explains_is_left_to_the_library() -> None:
    schema, parts = two_tools(patterns("a"), {})
    assert leave_out_refused(schema, lambda _: "always", parts, "json") == []
    assert schema["properties"] == {"0": patterns("a"), "1": {}}


@pytest.mark.parametrize("count", [MAX_FOUND, MAX_FOUND + 1])
def test_after_many_keywords_a_whole_part_is_left_out(count: int) -> None:
    names = [chr(ord("A") + i) for i in range(count)]
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"pattern": name} for name in names}}
    told = texts(leave_out_refused(schema, refuses_patterns, WHOLE, "json"))
    assert len(told) == count
    assert set(told[:MAX_FOUND]) <= {f"format: #/properties/{name}/pattern" for name in names}
    assert told[MAX_FOUND:] == ["format: #"] * (count > MAX_FOUND)
    assert ("properties" in schema) == (count == MAX_FOUND)


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"maxLength": 1, "minLength": 1, "pattern": "a"}
    for num_tried, found in ((2, False), (3, True)):
        monkeypatch.setattr(schema_trial, "MAX_TRIED_CHARACTERS", num_tried * (1 + len(json.dumps(schema))))
        path, node, keyword = find_refused(schema, refuses_patterns, "pattern a")
        assert ((path, keyword), node is not None) == (("#", "pattern") if found else ("", ""), found)


SELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, False),
        ({}, False),
        (SELF, True),
        ({"type": "object", "properties": {"a": SELF}}, False),
        ({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, True),
        ({"properties": {"a": SELF}, "required": ["a"]}, False),  # a string is one, too
        ({"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]}, False),
        ({"type": ["object", "array"], "properties": {"a": SELF}, "required": ["a"]}, False),
        ({"type": ["object", "array"], "properties": {"a": SELF}, "required": ["a"], "items": SELF, "minItems": 1}, True),
        ({"type": "object", "properties": {"a": {}, "b": SELF}, "required": ["a", "b"]}, True),
        ({"type": "object", "properties": {"a": SELF}, "required": ["b"]}, False),
        ({"type": "object", "properties": {"a/b~c": SELF}, "required": ["a/b~c"]}, True),
        ({"type": "object", "properties": {"a": SELF}, "required": ["a"], "enum": [{}]}, False),
        ({"type": "object", "properties": {"a": SELF}, "required": ["a"], "const": {}}, False),
        ({"type": "array", "items": SELF}, False),
        ({"type": "array", "items": SELF, "minItems": 0}, False),
        ({"type": "array", "items": SELF, "minItems": 1}, True),
        ({"type": "array", "prefixItems": [SELF], "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{}], "items": {}, "minItems": 1}, False),
        ({"anyOf": [SELF]}, True),
        ({"anyOf": [SELF, {}]}, False),
        ({"anyOf": [{}], "oneOf": [SELF, SELF]}, True),
        ({"oneOf": [SELF, {"type": "null"}]}, False),
        ({"allOf": [{}, SELF]}, True),
        ({"allOf": [{}, {"type": "null"}]}, False),
        ({"enum": [1], "allOf": [SELF]}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, False),
    ],
)  # fmt: skip
def test_schemas_whose_values_never_end(schema: object, expected: bool) -> None:
    assert never_ends(schema) is expected
