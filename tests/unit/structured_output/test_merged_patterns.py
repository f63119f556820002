"""Values that must match many patterns at once: such patterns are refused, or left out where a schema is lenient. The grammar
library would need hours for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.structured_output.merged_patterns import MAX_MERGED_PATTERNS, leave_out_merged_patterns
from inflight.structured_output.spec import SchemaPart

LENIENT = (SchemaPart("#", "response_format", is_strict=False),)
Schema = dict[str, Any]  # Any: JSON


def text(index: int) -> Schema:
    return {"type": "string", "pattern": f"a{index}"}


def chain(count: int) -> Schema:
    schema = text(0)
    for index in range(1, count):
        schema = {"allOf": [schema, text(index)]}
    return schema


def in_turn(count: int) -> Schema:
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", **text(i)} for i in range(count - 1)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count - 1}": text(count)}}


def known_before(count: int) -> Schema:
    """The subschemas are referred to before they meet."""
    references = [{"$ref": f"#/$defs/d{i}"} for i in range(count)]
    alone = {f"p{i}": reference for i, reference in enumerate(references)}
    return {"properties": {**alone, "x": {"allOf": references}}, "$defs": {f"d{i}": text(i) for i in range(count)}}


def all_of(make: Callable[[int], Schema]) -> Callable[[int], Schema]:
    return lambda count: {"allOf": [make(index) for index in range(count)]}


SHAPES: dict[str, Callable[[int], Schema]] = {
    "allOf": all_of(text),
    "chain": chain,
    "references": in_turn,
    "references that were seen": known_before,
    "one branch": all_of(lambda i: {"anyOf": [text(i)]}),
    "properties": all_of(lambda i: {"properties": {"x/y": text(i)}}),
    "items": all_of(lambda i: {"items": text(i)}),
    "items by place": all_of(lambda i: {"prefixItems": [text(i)]} if i % 2 else {"items": text(i)}),
    "other properties": all_of(
        lambda i: {"properties": {"x": text(i)}} if i % 2 else {"additionalProperties": text(i)}
    ),
    "inside": all_of(lambda i: {"properties": {"x": {"items": {"allOf": [text(i)]}}}}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_many_patterns_of_one_value(shape: str) -> None:
    assert leave_out_merged_patterns(SHAPES[shape](MAX_MERGED_PATTERNS), (), "json") == []
    with pytest.raises(InvalidRequestError, match="patterns meet in one value"):
        leave_out_merged_patterns(SHAPES[shape](30), (), "json")
    schema = SHAPES[shape](30)
    assert len(leave_out_merged_patterns(schema, LENIENT, "json")) >= 30 - MAX_MERGED_PATTERNS
    assert leave_out_merged_patterns(schema, (), "json") == [], "what is left has few enough"


def test_many_patterns_of_many_values() -> None:
    values = {f"p{i}": text(i) for i in range(500)}
    branches = [{"type": "object", "properties": values}, {"properties": {"p0": {"minLength": 1}}}]
    assert leave_out_merged_patterns({"allOf": branches, "anyOf": list(values.values())}, (), "json") == []


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#"}, *map(text, range(9))]}}}
    with pytest.raises(InvalidRequestError):
        leave_out_merged_patterns(schema, (), "json")
