"""Specs as cache keys, and the shapes of structural tags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.sampling_params import StructuredOutputsParams
from inflight.structured_output.spec import GrammarSpec, StructuralTag, Tag, parse_structural_tag


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
    tags = (Tag("<f=", "<f=a>", {"type": "null"}, "</f>"), Tag("[", "[x", True, ""))
    assert parse_structural_tag(json.dumps(document)) == StructuralTag(tags)
    options = {"separator": "; ", "at_least_one": True, "stop_after_first": True}
    assert parse_structural_tag(json.dumps(document | options)) == StructuralTag(tags, "; ", True, True)
    assert StructuralTag(tags).triggers == ["<f=", "["]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "tag"}, "must have the shape"),
        ({"structures": []}, "at least one entry"),
        ({"structures": {}}, "at least one entry"),
        ({"structures": ["a"]}, r"structures\[0\] must be an object with the keys begin, schema, end"),
        ({"structures": [{**STRUCTURE, "extra": 1}]}, r"structures\[0\] must be an object"),
        ({"structures": [STRUCTURE, {**STRUCTURE, "begin": 1}]}, r"structures\[1\]: begin and end must be strings"),
        ({"structures": [{**STRUCTURE, "schema": "{}"}]}, "schema a JSON schema"),
        ({"triggers": []}, "none of them"),
        ({"triggers": [""]}, "not a list of non-empty strings"),
        ({"triggers": "<f="}, "not a list of non-empty strings"),
        ({"triggers": ["<g="]}, "must start with exactly one trigger, and starts with none of them"),
        ({"triggers": ["<f", "<f="]}, "starts with '<f' and '<f='"),
        ({"separator": None}, "separator=None is not a string"),
        ({"stop_after_first": 1}, "stop_after_first=1 is not true or false"),
        ({"at_least_one": True}, "at_least_one needs a separator"),
        ({"excludes": []}, "unknown key 'excludes'; known are at_least_one, otherwise, separator"),
        ({"otherwise": {**STRUCTURE, "begin": ""}}, "otherwise needs a separator"),
        ({"otherwise": {}, "separator": "", "at_least_one": True}, "excludes at_least_one"),
        ({"otherwise": {}, "separator": ""}, "otherwise must be an object with the keys begin, schema, end"),
        ({"structures": [{**STRUCTURE, "parts": [["#", "a"]]}]}, r"structures\[0\]: parts must be a list of"),
        ({"structures": [{**STRUCTURE, "parts": 3}]}, r"structures\[0\]: parts must be a list of"),
        ({"triggers": ["<f=", "["]}, r"no structure begins with the trigger '\['"),
    ],
)
def test_other_shapes_are_refused(change: dict[str, object], message: str) -> None:
    document = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<f="], **change}
    with pytest.raises(InvalidRequestError, match=message):
        parse_structural_tag(json.dumps(document))
