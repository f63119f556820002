"""Objects between tags: how large a schema may become."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.parsers.markup import default_markup
from inflight.structured_output.structural_tag import parse_structural_tag
from inflight.structured_output.tagged_object import TaggedObject


def write(schema: dict[str, Any]) -> str:
    markup = default_markup("qwen3_coder")
    assert markup is not None and markup.arguments is not None
    structure = {"begin": "<a>", "schema": schema, "end": "</a>", "arguments": asdict(markup.arguments)}
    tag = json.dumps({"type": "structural_tag", "structures": [structure], "triggers": ["<a>"]})
    return TaggedObject(
        "a", parse_structural_tag(tag).all_tags[0], json.dumps, lambda _, text, end: (text, []), {}
    ).write()


def nested(keyword: str, depth: int, last: dict[str, Any]) -> dict[str, Any]:
    """Three references on each level, so 3**depth parts."""
    levels = {str(i): {keyword: [{"$ref": f"#/$defs/{i + 1}"}] * 3} for i in range(depth)}
    return {"$defs": {**levels, str(depth): last}}


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_references_inside_each_other_do_not_grow_without_end(keyword: str) -> None:
    for depth, is_too_large in ((4, False), (30, True)):
        schema = nested(keyword, depth, {"type": "string"})
        start = {"$ref": "#/$defs/0"}
        schema |= {"allOf": [start]} if keyword == "allOf" else {"properties": {"x": start}}
        if is_too_large:
            with pytest.raises(InvalidRequestError, match="more than 4000 parts"):
                write(schema)
        else:
            write(schema)


def test_as_many_properties_as_a_schema_may_have() -> None:
    assert write({"properties": {str(i): {"type": "string"} for i in range(2000)}})
