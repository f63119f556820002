"""`response_format` as a constraint of the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.openai.protocol import CompletionRequest
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.unit.entrypoints.refusals import refused

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
STRUCTURES = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
TAGS = [{"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}]
OLD = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<f"]}


def constraint(response_format: dict[str, Any], **more: Any) -> StructuredOutputsParams:
    body = CompletionRequest.model_validate({"prompt": "x", "response_format": response_format, **more})
    params = body.sampling_params(SamplingParams(), max_tokens=9, logprobs=None)
    assert params.structured_outputs is not None
    return params.structured_outputs


def new(**more: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS, **more}}


def test_both_forms_of_a_structural_tag() -> None:
    expected = StructuredOutputsParams(structural_tag=OLD)
    assert constraint(OLD) == constraint(new()) == constraint(new(at_least_one=False)) == expected
    assert json.dumps(SCHEMA) in str(expected.structural_tag)  # properties come in the order in which they were given
    stopped = StructuredOutputsParams(structural_tag={**OLD, "stop_after_first": True})
    assert constraint(new(stop_after_first=True)) == stopped


@pytest.mark.parametrize(
    ("response_format", "words"),
    [
        ({"type": "structural_tag"}, "either structures and triggers, or format alone"),
        ({"type": "structural_tag", "structures": STRUCTURES}, "either structures and triggers, or format alone"),
        ({**OLD, **new()}, "either structures and triggers, or format alone"),
        ({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}, "'triggered_tags'"),
        (new(at_least_one=True), "False"),
        (new(tags=[{**TAGS[0], "content": {"type": "any_text"}}]), "'json_schema'"),
    ],
)
def test_structural_tags_that_are_refused(response_format: dict[str, Any], words: str) -> None:
    with pytest.raises((FieldError, ValidationError), match=words):
        constraint(response_format)


LENIENT = StructuredOutputsParams(json=SCHEMA, lenient=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ({"ebnf": 'root ::= "a"'}, StructuredOutputsParams(grammar='root ::= "a"')),
        ({"grammar": 'root ::= "a"'}, StructuredOutputsParams(grammar='root ::= "a"')),
        ({"json_schema": SCHEMA}, LENIENT),
        ({"json_schema": json.dumps(SCHEMA)}, LENIENT),
        ({"format": "json"}, StructuredOutputsParams(json_object=True)),
        ({"format": SCHEMA}, LENIENT),
        ({"guided_json_object": True}, StructuredOutputsParams(json_object=True)),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"),
        ),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, LENIENT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, LENIENT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutputsParams(json=SCHEMA),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json", "value": SCHEMA}}, LENIENT),
        ({"response_format": {"type": "regex", "value": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"response_format": {"type": "grammar", "grammar": "x"}}, StructuredOutputsParams(grammar="x")),
        ({"structured_outputs": {"structural_tag": new()}}, StructuredOutputsParams(structural_tag=OLD)),
        # the same in the words of two servers, as guidance sends it
        ({"structured_outputs": {"grammar": "x"}, "guided_grammar": "x"}, StructuredOutputsParams(grammar="x")),
        ({"guided_json_object": False}, None),
    ],
)
def test_constraints_in_the_words_of_all_engines(fields: dict[str, Any], expected: StructuredOutputsParams) -> None:
    body = CompletionRequest.model_validate({"prompt": "x", **fields})
    params = body.sampling_params(SamplingParams(), max_tokens=9, logprobs=None)
    assert params.structured_outputs == expected


def test_limits_of_saved_blocks() -> None:
    for given in ({}, {"max_load_tokens": 7}, {"max_load_tokens": 0, "max_offload_tokens": 12}, None):
        body = CompletionRequest.model_validate({"prompt": "x", "kv_transfer_params": given})
        params = body.sampling_params(SamplingParams(), max_tokens=9, logprobs=None)
        expected = given or {}
        assert params.max_load_tokens == expected.get("max_load_tokens")
        assert params.max_offload_tokens == expected.get("max_offload_tokens")
    for wrong in ({"max_load_tokens": -1}, {"max_offload_tokens": "many"}, {"max_load_tokens": 2**31}, 5):
        with pytest.raises(ValidationError, match="kv_transfer_params"):
            CompletionRequest.model_validate({"prompt": "x", "kv_transfer_params": wrong})


def test_a_format_without_its_constraint() -> None:
    with refused("response_format.json_schema.schema"):
        constraint({"type": "json_schema", "json_schema": {"name": "x"}})
    with refused("response_format.pattern"):
        constraint({"type": "regex"})
    with pytest.raises(ValidationError, match="triggered_tags"):
        constraint({"type": "structural_tag", "format": {"type": "sequence", "triggers": ["<f"], "tags": TAGS}})


def test_one_constraint_only() -> None:
    with refused("guided_regex"):
        constraint(OLD, guided_regex="a")
