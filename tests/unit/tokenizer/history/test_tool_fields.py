"""Fields of tools that a template needs and a client leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from tests.unit.tokenizer.history.small_templates import render, user

AS_JSON = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
FUNCTION = "{% for t in tools or [] %}{% set f = t.function %}"
PROPERTIES = (
    FUNCTION
    + "{% for name, p in f.parameters.properties.items() %}{{ name }}:{{ p.type + p.description }} {% endfor %}"
)


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def parameters(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (tool(), {}),
        (tool(description=None, parameters=None, strict=None), {}),
        (tool(strict=True, parameters={}), {"strict": True, "parameters": {}}),
        (tool(parameters=parameters(type="string")), {"parameters": parameters(type="string")}),
    ],
)
def test_a_template_that_needs_nothing_gets_what_was_sent(given: dict[str, Any], shown: dict[str, Any]) -> None:
    assert json.loads(render(AS_JSON, [user()], tools=[given])) == tool(**shown)
    untyped = {"function": given["function"]}
    assert json.loads(render(AS_JSON, [user()], tools=[untyped])) == tool(**shown)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ '// ' + f.description }}", "//"),
        ("{{ f.description }}{{ f.parameters | tojson }}", '{"type": "object", "properties": {}}'),
        ("{{ f.parameters.properties.items() | list }}", "[]"),
        ("{{ f.parameters.required | join(',') }}{{ f.parameters.required | tojson }}", "[]"),
        ("{{ '' + f.parameters.type }}", "object"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"parameters": {}}, {"description": None}, {"parameters": None}])
def test_a_field_that_the_template_needs_is_empty(source: str, wanted: str, fields: dict[str, Any]) -> None:
    given = {} if "tojson" in source and "required" not in source else fields
    assert render(FUNCTION + source + "{% endfor %}", [user()], tools=[tool(**given)]) == wanted


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({}, "a:string"),
        ({"type": "integer"}, "a:integer"),
        ({"enum": [1, 2]}, "a:integer"),
        ({"const": True}, "a:boolean"),
        ({"properties": {}}, "a:object"),
        ({"items": {}}, "a:array"),
        ({"anyOf": [{"type": "number"}], "description": "D"}, "a:stringD"),
    ],
)
def test_fields_of_parameters(schema: dict[str, Any], wanted: str) -> None:
    assert render(PROPERTIES + "{% endfor %}", [user()], tools=[tool(parameters=parameters(**schema))]) == wanted


def test_types_and_objects_that_a_template_cannot_read() -> None:
    given = parameters(type=["null", "integer"])
    assert render(PROPERTIES + "{% endfor %}", [user()], tools=[tool(parameters=given)]) == "a:integer"
    assert json.loads(render(AS_JSON, [user()], tools=[tool(parameters=given)])) == tool(parameters=given)
    needs = AS_JSON + "{% for t in tools or [] %}{% for p in t.function.parameters.properties.values() %}"
    needs += "{% if p.type == 'object' and p.additionalProperties is not defined %}{{ raise_exception('open') }}"
    needs += "{% endif %}{% endfor %}{% endfor %}"
    (shown,) = json.loads(render(needs, [user()], tools=[tool(parameters=parameters(type="object"))]))["function"][
        "parameters"
    ]["properties"].values()
    assert shown == {"type": "object", "additionalProperties": {}}


def test_a_template_that_refuses_all_tools_says_why() -> None:
    source = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"
    with pytest.raises(InvalidRequestError, match="no tools"):
        render(source, [user()], tools=[tool()])
