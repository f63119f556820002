"""`response_format` as a constraint of the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.protocol import CompletionRequest
from inflight.sampling_params import SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
STRUCTURES = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
TAGS = [{"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}]
OLD = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<f"]}


def constraint(response_format: dict[str, Any], **more: Any) -> StructuredOutputsParams:
    body = CompletionRequest.model_validate({"prompt": "x", "response_format": response_format, **more})
    params = body.sampling_params(SamplingParams(), max_tokens=9, logprobs=None, prompt_logprobs=None)
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


def test_one_constraint_only() -> None:
    with pytest.raises(FieldError, match="response_format and guided_regex each constrain the text"):
        constraint(OLD, guided_regex="a")
