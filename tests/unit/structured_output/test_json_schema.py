"""The walk: what is refused, with which path; what is left out; what is neither."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.structured_output import json_schema
from inflight.structured_output.json_schema import ASSERTIONS, MAX_DEPTH, SchemaSupport, relax_schema, subschemas
from inflight.structured_output.spec import RESPONSE_FORMAT, SchemaPart
from tests.support.refusals import refused
from tests.support.schema_generator import FORMATS, generate_schemas, texts

SUPPORT = SchemaSupport(ASSERTIONS - {"not", "uniqueItems"}, frozenset({"date"}))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def properties(count: int) -> dict[str, Any]:
    return {f"p{i}": {} for i in range(count)}


REFUSED: list[tuple[object, str]] = [
    ({"not": {}}, "#/not is not supported"),
    ({"properties": {"a": {"items": {"not": {}}}}}, "#/properties/a/items/not is not supported"),
    ({"properties": {"a/b~c": {"not": {}}}}, "#/properties/a~1b~0c/not is not supported"),
    ({"items": [{}, {"not": True}]}, "#/items/1/not is not supported"),
    ({"anyOf": [{}, {"if": {"not": {}}}]}, "#/anyOf/1/if/not is not supported"),
    ({"additionalProperties": {"not": {}}}, "#/additionalProperties/not is not supported"),
    ({"$defs": {"a": {"not": {}}}, "items": {"$ref": "#/$defs/a"}}, "#/$defs/a/not is not supported"),
    ({"definitions": {"a": {"not": {}}}, "$ref": "#/definitions/a"}, "#/definitions/a/not is not supported"),
    ({"$ref": "#/$defs/a"}, "#/$ref '#/$defs/a' does not exist"),
    ({"$ref": "http://example.com/schema"}, "#/$ref 'http://example.com/schema' is not supported"),
    ({"$ref": "other.json#/a"}, "must be a path in the schema"),
    ({"x-guidance": {"lenient": True}}, "#/x-guidance is not supported"),
    ({"type": "strin"}, "#/type 'strin' is none of array"),
    ({"type": ["string", 3]}, "#/type 3 is none of"),
    ({"type": []}, "#/type [] is none of"),
    ({"type": "object", "properties": []}, "#/properties is a list, not an object of schemas"),
    ({"anyOf": {}}, "#/anyOf is a dict, not a list of schemas"),
    ({"items": "string"}, "#/items is 'string', not a schema"),
    ({"items": 3}, "#/items is 3, not a schema"),
    ({"type": None}, "#/type None is none of"),
    ({"type": "any"}, "#/type 'any' is none of"),
    ({"properties": {"a": None}}, "#/properties/a is None, not a schema"),
    ({"properties": {"a": {"required": True}}}, "#/properties/a/required is not a list of property names"),
    ({"minLength": -1}, "#/minLength is -1, not an integer"),
    ({"maxItems": 1.5}, "#/maxItems is 1.5, not an integer"),
    ({"maxItems": True}, "#/maxItems is True, not an integer"),
    ({"maxLength": 2**40}, "#/maxLength is 1099511627776, not an integer in [0, 2147483647]"),
    ({"minimum": "1"}, "#/minimum is '1', not a number"),
    ({"pattern": 1}, "#/pattern is 1, not a string"),
    ({"$ref": 1}, "#/$ref is 1, not a string"),
    ({"enum": []}, "#/enum is not a list with at least one value"),
    ({"required": "a"}, "#/required is not a list of property names"),
    ([], "# is a list, not a schema"),
    (nested(MAX_DEPTH + 1), "is nested more than 100 deep"),
    ({"anyOf": [{}] * 60_000}, "at most 50000 are allowed"),
    ({"items": {"properties": properties(2001)}}, "#/items/properties gives one object 2001 properties; at most 2000"),
    ({"patternProperties": properties(101)}, "#/patternProperties gives one object 101 patternProperties; at most 100"),
    (
        {
            "allOf": [{"properties": properties(1000)}, {"$ref": "#/$defs/a"}],
            "$defs": {"a": {"properties": properties(1001)}},
        },
        "gives one object 2001 properties; at most 2000",
    ),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_is_refused(schema: object, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        relax_schema(schema, SUPPORT)
    assert str(refusal.value).startswith("json: #")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"properties": properties(2000), "patternProperties": properties(100)},
        {"anyOf": [{"properties": properties(1500)}, {"properties": {"a": {"properties": properties(1500)}}}]},
        {"title": "T", "default": {"not": 1}, "examples": [{"not": {}}], "unknown": {"not": {}}},
        {"const": {"not": {}}, "enum": [{"uniqueItems": True}]},
        {"properties": {"not": {}, "uniqueItems": {"type": "string"}}},
        {"$defs": {"unused": {"not": {}}}},
        {"$defs": {"node": {"items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"},
        {"items": {"$ref": "#"}},
        {"anyOf": [{"type": "string"}, {"$ref": "#/anyOf/0"}]},
        {"$defs": {"a/b": {"type": "null"}}, "$ref": "#/$defs/a~1b"},
        nested(MAX_DEPTH - 1),
    ],
)
def test_what_is_neither_refused_nor_left_out(schema: object) -> None:
    relaxed = copy.deepcopy(schema)
    assert relax_schema(relaxed, SUPPORT) == []
    assert relaxed == schema


LENIENT = (SchemaPart("#", "tools[0]", False, "f"),)
STRICT = (SchemaPart("#", "tools[0]", True, "f"),)
# the schema, what is left of it, what is told
SOFT: list[tuple[Any, Any, list[str]]] = [
    ({"propertyNames": {"type": "string"}}, {}, []),
    ({"uniqueItems": False, "propertyNames": {}}, {}, []),
    ({"uniqueItems": True, "items": {}}, {"items": {}}, ["#/uniqueItems"]),
    ({"properties": {"a": {"format": "int32"}}}, {"properties": {"a": {}}}, ["#/properties/a/format"]),
    ({"format": "date"}, {"format": "date"}, []),
    # null is an absent keyword, but for values that may be null
    ({"type": "object", **dict.fromkeys(ASSERTIONS - {"const", "type"})}, {"type": "object"}, []),
    ({"const": None, "default": None, "description": None}, {"const": None, "default": None, "description": None}, []),
    ({"enum": [None]}, {"enum": [None]}, []),
    # the nullable of OpenAPI 3.0
    ({"type": "string", "nullable": True}, {"type": ["string", "null"], "nullable": True}, []),
    ({"type": ["string", "null"], "nullable": True}, {"type": ["string", "null"], "nullable": True}, []),
    ({"type": "string", "nullable": False}, {"type": "string", "nullable": False}, []),
    (
        {"type": "string", "enum": ["a"], "nullable": True},
        {"type": ["string", "null"], "enum": ["a", None], "nullable": True},
        [],
    ),
]
HARD: list[tuple[Any, Any, list[str]]] = [
    ({"not": {"uniqueItems": True}, "type": "string"}, {"type": "string"}, ["#/not"]),
    ({"oneOf": [{"not": {}}, {"type": "null"}]}, {"anyOf": [{}, {"type": "null"}]}, ["#/oneOf", "#/anyOf/0/not"]),
    ({"$ref": "http://a/b", "type": "null"}, {"type": "null"}, ["#/$ref"]),
    ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, {"$defs": {"a": {}}, "$ref": "#/$defs/a"}, ["#/$defs/a/not"]),
]


# what the standard does not allow, what is left of it, what is told
MALFORMED: list[tuple[Any, Any, list[str]]] = [
    ({"type": "any"}, {}, ["#/type"]),
    ({"type": "int", "minimum": 1}, {"minimum": 1}, ["#/type"]),
    ({"type": []}, {}, ["#/type"]),
    ({"type": None}, {}, ["#/type"]),
    ({"type": ["string", "dict"]}, {}, ["#/type"]),
    ({"properties": {"a": {"required": True}}}, {"properties": {"a": {}}}, ["#/properties/a/required"]),
    ({"required": "a"}, {}, ["#/required"]),
    ({"minimum": "5", "maximum": 6}, {"maximum": 6}, ["#/minimum"]),
    ({"enum": []}, {}, ["#/enum"]),
    ({"properties": {"a/b": None, "c": {}}}, {"properties": {"a/b": True, "c": {}}}, ["#/properties/a~1b"]),
    ({"properties": [], "additionalProperties": False}, {}, ["#/properties", "#/additionalProperties"]),
    ({"anyOf": ["string", {}]}, {"anyOf": [True, {}]}, ["#/anyOf/0"]),
    ({"items": "string"}, {}, ["#/items"]),
    ({"items": ["string"]}, {"items": [True]}, ["#/items/0"]),
    ({"additionalProperties": "false"}, {}, ["#/additionalProperties"]),
    ({"$ref": "#/nothing"}, {}, ["#/$ref"]),
    ({"$ref": "#/title", "title": "t"}, {"title": "t"}, ["#/$ref"]),
    ({"x-guidance": {}}, {}, ["#/x-guidance"]),
]


@pytest.mark.parametrize(("schema", "left", "told"), MALFORMED)
def test_malformed_keywords_are_left_out_of_a_lenient_schema(schema: Any, left: Any, told: list[str]) -> None:
    relaxed = copy.deepcopy(schema)
    assert texts(relax_schema(relaxed, SUPPORT, LENIENT)) == [f"tools[0] ('f'): {path}" for path in told]
    assert relaxed == left
    for parts in (STRICT, (SchemaPart("#", RESPONSE_FORMAT, is_strict=False),)):
        with pytest.raises(InvalidRequestError):
            relax_schema(copy.deepcopy(schema), SUPPORT, parts)


ODD: list[Any] = [None, True, 5, -1, 1.5, "any", [], {}, [None], ["any"], {"a": None}, {"a": "string"}, "#/nothing"]


@pytest.mark.parametrize("keyword", sorted(ASSERTIONS | {"nullable", "$id", "$defs", "x-guidance"}))
def test_a_lenient_schema_is_never_refused_for_a_keyword(keyword: str) -> None:
    for value in ODD:
        node = {"type": "object", "properties": {"a": {}}, "required": ["a"], keyword: value}
        for schema in (node, {"items": node}, {"properties": {"p": node}}):
            relax_schema(copy.deepcopy(schema), SUPPORT, LENIENT)
            with suppress(InvalidRequestError):  # and no other error
                relax_schema(copy.deepcopy(schema), SUPPORT, STRICT)


@pytest.mark.parametrize(("schema", "left", "told"), SOFT)
@pytest.mark.parametrize("parts", [LENIENT, STRICT])
def test_what_is_left_out_of_every_schema(schema: Any, left: Any, told: list[str], parts: tuple[SchemaPart]) -> None:
    relaxed = copy.deepcopy(schema)
    assert texts(relax_schema(relaxed, SUPPORT, parts)) == [f"tools[0] ('f'): {path}" for path in told]
    assert relaxed == left


@pytest.mark.parametrize(("schema", "left", "told"), HARD)
def test_what_is_left_out_of_a_lenient_schema_and_refused_in_a_strict_one(
    schema: Any, left: Any, told: list[str]
) -> None:
    relaxed = copy.deepcopy(schema)
    assert texts(relax_schema(relaxed, SUPPORT, LENIENT)) == [f"tools[0] ('f'): {path}" for path in told]
    assert relaxed == left
    if "oneOf" not in schema:
        with refused("tools[0]", "#/"):
            relax_schema(copy.deepcopy(schema), SUPPORT, STRICT)


def test_an_object_does_not_forbid_what_a_pattern_that_is_left_out_admits() -> None:
    schema = {"patternProperties": {"^a": {}}, "additionalProperties": False, "properties": {"b": {}}}
    support = SchemaSupport(ASSERTIONS - {"patternProperties"})
    assert texts(relax_schema(schema, support, LENIENT)) == [
        "tools[0] ('f'): #/patternProperties",
        "tools[0] ('f'): #/additionalProperties",
    ]
    assert schema == {"properties": {"b": {}}}


def test_each_part_is_as_strict_as_its_author_wants_and_named_after_it() -> None:
    schema = {"anyOf": [{"not": {}}, {"items": {"not": {}}}]}
    parts = (SchemaPart("#/anyOf/0", "a", is_strict=False), SchemaPart("#/anyOf/1", "b", is_strict=True))
    with pytest.raises(
        InvalidRequestError, match=r"^b: #/items/not is not supported; leave it out, or set strict to false"
    ):
        relax_schema(copy.deepcopy(schema), SUPPORT, parts)
    assert texts(relax_schema({"anyOf": schema["anyOf"][:1]}, SUPPORT, parts)) == ["a: #/not"]


@given(st.integers(0, 10**6))
def test_an_unsupported_keyword_is_found_wherever_it_is_put(seed: int) -> None:
    rng = random.Random(seed)
    schema = generate_schemas(2, seed, max_depth=3)[1]
    support = SchemaSupport(ASSERTIONS - {"not"}, frozenset(FORMATS))
    relax_schema(schema, support)
    places: list[tuple[dict[str, Any], str]] = []

    def collect(node: dict[str, Any], path: str) -> None:
        places.append((node, path))
        for name, child in node.get("properties", {}).items():
            collect(child, f"{path}/properties/{name.replace('~', '~0').replace('/', '~1')}")
        for keyword in ("anyOf", "oneOf", "prefixItems"):
            for i, child in enumerate(node.get(keyword, [])):
                collect(child, f"{path}/{keyword}/{i}")
        if isinstance(node.get("items"), dict):
            collect(node["items"], f"{path}/items")

    collect(schema, "#")
    node, path = rng.choice(places)
    node["not"] = {}
    with pytest.raises(InvalidRequestError) as refusal:
        relax_schema(schema, support)
    assert str(refusal.value) == f"json: {path}/not is not supported"


def test_subschemas_have_their_paths() -> None:
    schema = {"items": [{"oneOf": [True]}], "properties": {"b/c": {"const": {"not": {}}}}}
    assert sorted(path for path, _ in subschemas(schema)) == ["#", "#/items/0", "#/properties/b~1c"]


@pytest.mark.parametrize(
    ("branches", "is_told"),
    [
        ([{"type": "string"}, {"type": "integer"}, {"type": "null"}], False),
        ([{"type": "number"}, {"type": "integer"}], True),
        ([{"const": "a"}, {"enum": ["b", 1]}], False),
        ([{"const": "a"}, {"enum": ["b", "a"]}], True),
        ([{"const": "a"}, {"type": "string"}], True),
        ([{"properties": {"k": {"const": kind}}, "required": ["x", "k"]} for kind in ("a", "b")], False),
        ([{"properties": {"k": {"const": kind}}, "required": ["x"]} for kind in ("a", "b")], True),
        ([{"properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("a", "a")], True),
        ([True, {"type": "null"}], True),
        ([{"pattern": "a"}, {"minLength": 3}], True),
    ],
)
def test_a_one_of_that_is_read_as_any_of_is_told_unless_the_branches_exclude_each_other(
    branches: list[Any], is_told: bool
) -> None:
    support = SchemaSupport(ASSERTIONS - {"oneOf"})
    told = texts(relax_schema({"oneOf": branches}, support, [SchemaPart("#", "s", is_strict=False)]))
    assert told == (["s: #/oneOf"] if is_told else [])


def test_a_long_name_is_refused_before_each_subschema_below_repeats_it() -> None:
    inside: dict[str, Any] = {str(i): {} for i in range(1000)}
    assert list(subschemas({"properties": {"a" * 1000: {"properties": inside}}}))
    with pytest.raises(InvalidRequestError, match="has a path of more than 2048 characters") as caught:
        list(subschemas({"properties": {"a" * 10_000: {"properties": inside}}}))
    assert len(str(caught.value)) < 500


def test_branches_with_many_required_properties_are_compared_in_time_that_grows_with_the_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only properties that all branches require are looked at."""
    looked: list[object] = []
    monkeypatch.setattr(json_schema, "_values", lambda node: looked.append(node))
    names = [f"p{i}" for i in range(500)]
    first = {"properties": {name: {"const": 1} for name in names}, "required": names}
    others = [{"properties": {f"p{i}": {"const": 2}}, "required": [f"p{i}"]} for i in range(20)]
    assert not json_schema._exclude_each_other([first, *others])
    assert len(looked) <= 21
