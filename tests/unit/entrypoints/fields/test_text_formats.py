"""Objects that say what form the text must have, and the constraints they mean."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from inflight.entrypoints.fields.text_formats import (
    AnyFormat,
    OutputFormat,
    PlainFormat,
    ResponseFormat,
    SchemaFormat,
    constraint_of,
)
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.unit.entrypoints.refusals import refused

SCHEMA: dict[str, Any] = {"type": "integer"}
RESPONSE: TypeAdapter[Any] = TypeAdapter(ResponseFormat)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (PlainFormat(type="json_object"), StructuredOutputsParams(json_object=True)),
        (RESPONSE.validate_python({"type": "json_object"}), StructuredOutputsParams(json_object=True)),
        (
            RESPONSE.validate_python({"type": "json_object", "schema": SCHEMA}),
            StructuredOutputsParams(json=SCHEMA, lenient=True),
        ),
        (SchemaFormat(type="json_schema", schema=SCHEMA), StructuredOutputsParams(json=SCHEMA, lenient=True)),
        (SchemaFormat(type="json_schema", schema=SCHEMA, strict=True), StructuredOutputsParams(json=SCHEMA)),
        (OutputFormat(type="json_schema", schema=SCHEMA), StructuredOutputsParams(json=SCHEMA, lenient=True)),
        (RESPONSE.validate_python({"type": "regex", "value": "a"}), StructuredOutputsParams(regex="a")),
        (RESPONSE.validate_python({"type": "json", "value": "{}"}), StructuredOutputsParams(json="{}", lenient=True)),
    ],
)
def test_what_a_format_means(wanted: AnyFormat, expected: StructuredOutputsParams) -> None:
    assert constraint_of(wanted, "x") == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [({"type": "regex"}, "x.pattern"), ({"type": "json_schema", "json_schema": {}}, "x.json_schema.schema")],
)
def test_a_format_that_is_not_complete(given: dict[str, Any], param: str) -> None:
    with refused(param):
        constraint_of(RESPONSE.validate_python(given), "x")
