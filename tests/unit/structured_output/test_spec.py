"""Specs as cache keys, and the shapes of structural tags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_output.structural_tag import StructuralTag, Tag, parse_structural_tag
from inflight.structured_outputs_params import StructuredOutputsParams


def spec(**constraint: Any) -> GrammarSpec:
    return GrammarSpec.from_params(StructuredOutputsParams(**constraint))


def test_equal_constraints_are_one_key() -> None:
    assert len({spec(json={"type": "null"}), spec(json='{"type": "null"}'), spec(json={"type": "null"})}) == 1
    assert len({spec(choice=["a", "b"]), spec(choice=("a", "b", "a")), spec(choice=iter(["a", "b"]))}) == 1


def test_no_white_space_is_a_choice_of_separators() -> None:
    assert spec(json={}, disable_any_whitespace=True) == spec(json={}, separators=[",", ":"])


def test_different_constraints_are_different_keys() -> None:
    schema = {"type": "object"}
    specs = [
        spec(json=schema),
        spec(json=schema, disable_any_whitespace=True),
        spec(json=schema, whitespace_pattern=" ?"),
        spec(json=schema, separators=(", ", ": ")),
        spec(json=schema, separators=(",", ": ")),
        spec(json={"properties": {"a": {}, "b": {}}}),
        spec(json={"properties": {"b": {}, "a": {}}}),  # emitted in this order
        spec(json_object=True),
        spec(regex="a"),
        spec(grammar="a"),
        spec(choice=["a"]),
        spec(choice=["ab"]),
        spec(choice=["a", "b"]),
        spec(choice=["b", "a"]),
    ]
    assert len(set(specs)) == len(specs)


def test_choices() -> None:
    choices = ["b", 'quo"te', "東京", "a\nb"]
    assert spec(choice=choices).choices() == choices


STRUCTURE = {"begin": "<f=a>", "schema": {"type": "null"}, "end": "</f>"}


def test_a_structural_tag() -> None:
    other = {"begin": "[x", "schema": True, "end": ""}
    document = {"type": "structural_tag", "structures": [STRUCTURE, other], "triggers": ["<f=", "["]}
    tags, triggers = (Tag("<f=a>", {"type": "null"}, "</f>"), Tag("[x", True, "")), ("<f=", "[")
    assert parse_structural_tag(json.dumps(document)) == StructuralTag(tags, triggers)
    options = {"separator": "; ", "at_least_one": True, "stop_after_first": True}
    assert parse_structural_tag(json.dumps(document | options)) == StructuralTag(tags, triggers, "; ", True, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "tag"}, r"Invalid enum value 'tag' - at `\$.type`"),
        ({"structures": []}, r"length >= 1 - at `\$.structures`"),
        ({"structures": {}}, r"Expected `array`, got `object` - at `\$.structures`"),
        ({"structures": ["a"]}, r"Expected `object`, got `str` - at `\$.structures\[0\]`"),
        ({"structures": [{**STRUCTURE, "extra": 1}]}, r"unknown field `extra` - at `\$.structures\[0\]`"),
        (
            {"structures": [STRUCTURE, {**STRUCTURE, "begin": 1}]},
            r"Expected `str`, got `int` - at `\$.structures\[1\].begin`",
        ),
        (
            {"structures": [{**STRUCTURE, "schema": "{}"}]},
            r"Expected `bool | object`, got `str` - at `\$.structures\[0\].schema`",
        ),
        ({"triggers": []}, "none of them"),
        ({"triggers": [""]}, "has an empty string"),
        ({"triggers": "<f="}, r"Expected `array`, got `str` - at `\$.triggers`"),
        ({"triggers": ["<g="]}, "must start with exactly one trigger, but starts with none of them"),
        ({"triggers": ["<f", "<f="]}, "starts with '<f' and '<f='"),
        ({"separator": None}, r"Expected `str`, got `null` - at `\$.separator`"),
        ({"stop_after_first": 1}, r"Expected `bool`, got `int` - at `\$.stop_after_first`"),
        ({"at_least_one": True}, "at_least_one needs a separator"),
        ({"excludes": []}, "unknown field `excludes`; docs/structured-output.md has its fields"),
        ({"otherwise": {**STRUCTURE, "begin": ""}}, "otherwise needs a separator"),
        ({"otherwise": {**STRUCTURE, "begin": ""}, "separator": "", "at_least_one": True}, "must not be used"),
        ({"otherwise": {}, "separator": ""}, r"missing required field `begin` - at `\$.otherwise`"),
        ({"structures": [{**STRUCTURE, "parts": [["#", "a"]]}]}, r"at `\$.structures\[0\].parts\[0\]`"),
        ({"structures": [{**STRUCTURE, "parts": 3}]}, r"Expected `array`, got `int` - at `\$.structures\[0\].parts`"),
        ({"triggers": ["<f=", "["]}, r"no structure begins with the trigger '\['"),
    ],
)
def test_other_shapes_are_refused(change: dict[str, object], message: str) -> None:
    document = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<f="], **change}
    with pytest.raises(InvalidRequestError, match=message):
        parse_structural_tag(json.dumps(document))
