"""`LeftOut`: many and long places are told short."""

from __future__ import annotations

from inflight.structured_output.json_schema import SchemaSupport, relax_schema
from inflight.structured_output.left_out import MAX_CHARACTERS, MAX_PLACES, LeftOut
from inflight.structured_output.merged_patterns import leave_out_merged_patterns
from inflight.structured_output.spec import SchemaPart, SchemaPlace
from tests.support.schema_generator import texts


def test_few_places_are_told_as_they_are() -> None:
    told = LeftOut()
    assert told.places() == []
    for i in range(MAX_PLACES):
        told.add(SchemaPlace("tools[0]", str(i)))
    assert texts(told.places()) == [str(i) for i in range(MAX_PLACES)]


def test_many_and_long_places_are_told_short() -> None:
    told = LeftOut()
    for i in range(MAX_PLACES + 7):
        told.add(SchemaPlace("tools[0]", f"{i}" + "x" * 2000))
    *places, last = texts(told.places())
    assert len(places) == MAX_PLACES and max(map(len, places)) <= MAX_CHARACTERS + 3
    assert last == "7 more places"


def test_a_schema_with_thousands_of_wrong_keywords_is_told_short() -> None:
    lenient = (SchemaPart("#", "tools[0]", False, "f"),)
    name = "p" * 1500
    properties = {f"{name}{i}": {"type": "any"} for i in range(1500)}
    schema = {"properties": {"a": {"properties": properties}, "b": 5}}
    told = texts(relax_schema(schema, SchemaSupport(frozenset({"type", "properties"})), lenient))
    assert sum(map(len, told)) < 50_000
    assert told[-1] == f"{1501 - MAX_PLACES} more places"
    merged = {"allOf": [{"pattern": f"a{i}"} for i in range(1000)]}
    assert texts(leave_out_merged_patterns(merged, lenient, "json"))[-1] == f"{1000 - MAX_PLACES} more places"
