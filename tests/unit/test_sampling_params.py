"""`SamplingParams`: what is refused, with which words; what is made of what is given."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from inflight.structured_outputs_params import MAX_CHOICES, MAX_GRAMMAR_LENGTH, StructuredOutputsParams

NO_INTEGERS = [1.0, 1.5, "1", True, None, [1]]
NO_NUMBERS = [math.nan, math.inf, -math.inf, "1", True, None, [1.0], 10**400, 1j]

# field, the values at its edges that are allowed, and just outside
RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [1, MAX_N], [0, -1, MAX_N + 1, *NO_INTEGERS]),
    ("temperature", [0, 0.0, 1e-30, 1e4], [-1e-9, 1e4 + 1, *NO_NUMBERS]),
    ("top_p", [1e-300, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0000001, *NO_NUMBERS]),
    ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 2**31, *NO_INTEGERS]),
    ("min_p", [0, 0.0, 1.0], [-0.1, 1.1, *NO_NUMBERS]),
    ("presence_penalty", [-2, 0, 2.0], [-2.01, 2.01, *NO_NUMBERS]),
    ("frequency_penalty", [-2, 0, 2.0], [-2.01, 2.01, *NO_NUMBERS]),
    ("repetition_penalty", [1e-9, 1, 1e4], [0, 0.0, -1.0, 1e5, *NO_NUMBERS]),
    ("seed", [None, 0, -1, MAX_SEED, -MAX_SEED - 1], [MAX_SEED + 1, -MAX_SEED - 2, 1.0, "1", True]),
    ("max_tokens", [None, 1, 2**31 - 1], [0, -1, 2**31, 1.0, "1", True]),
    ("min_tokens", [0, 16], [-1, 2**31, *NO_INTEGERS]),
    ("logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1, 1.0, "1", True]),
    ("prompt_logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1, 1.0, "1", True]),
    ("max_load_tokens", [None, 0, 2**31 - 1], [-1, 2**31, 1.0, "1", True]),
    ("max_offload_tokens", [None, 0, 2**31 - 1], [-1, 2**31, 1.0, "1", True]),
    ("thinking_token_budget", [None, -1, 0, 2**31 - 1], [-2, 2**31, 1.0, "1", True]),
    ("ignore_eos", [True, False], [0, 1, None, "yes"]),
    ("skip_special_tokens", [True, False], [0, None]),
    ("include_stop_str_in_output", [True, False], [0, None]),
    ("detokenize", [True, False], [0, None]),
    ("stop", [None, "a", [], ["a", "b"], ("a",), ["a" * MAX_STOP_STRING_LENGTH], ["a"] * MAX_STOP_STRINGS], []),
    ("stop", [], ["", [""], ["a", ""], [1], [None], 5, b"ab", {"a": 1}]),
    ("stop", [], [["a" * (MAX_STOP_STRING_LENGTH + 1)], ["a"] * (MAX_STOP_STRINGS + 1)]),
    ("stop_token_ids", [None, [], [0], range(MAX_STOP_TOKEN_IDS)], [range(MAX_STOP_TOKEN_IDS + 1)]),
    ("stop_token_ids", [], [[-1], [1.0], ["1"], [True], [None], 5, "12"]),
    ("bad_words", [None, [], ["a"], ["a"] * MAX_BAD_WORDS], [["a"] * (MAX_BAD_WORDS + 1)]),
    ("bad_words", [], ["bad", [""], [1], 5, ["a" * (MAX_STOP_STRING_LENGTH + 1)]]),
    ("allowed_token_ids", [None, [0], range(10_000)], [[], (), [-1], [1.0], ["1"], [True], 5, "12"]),
    ("logit_bias", [None, {}, {0: 1}, {5: -100.0, 6: 100}, dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)], []),
    ("logit_bias", [], [{0: 100.1}, {0: -101}, {-1: 1.0}, {"5": 1.0}, {True: 1.0}, {0: math.nan}, {0: "1"}, {0: None}]),
    ("structured_outputs", [None, StructuredOutputsParams(regex="a")], [{"regex": "a"}, "a", True]),
    ("logit_bias", [], [dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0), 5, [(1, 2.0)], "ab"]),
]


def with_field(name: str, value: object) -> SamplingParams:
    fields: dict[str, Any] = {name: value}  # Any: wrong types are the point
    return SamplingParams(**fields)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, good, _ in RANGES for value in good])
def test_what_is_allowed(name: str, value: object) -> None:
    with_field(name, value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, bad in RANGES for value in bad])
def test_what_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        with_field(name, value)
    assert caught.value.param.partition("[")[0] == name


def test_min_tokens_may_be_as_many_as_max_tokens() -> None:
    assert SamplingParams(min_tokens=2**31 - 1, max_tokens=2**31 - 1).min_tokens == 2**31 - 1


def test_every_field_is_tested() -> None:
    assert {name for name, _, _ in RANGES} == {field.name for field in dataclasses.fields(SamplingParams)}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
ANYTHING = SCALARS | st.lists(SCALARS) | st.dictionaries(st.integers() | st.text(), SCALARS) | st.builds(object)


@given(name=st.sampled_from(sorted({name for name, _, _ in RANGES})), value=ANYTHING)
def test_no_value_raises_anything_else(name: str, value: object) -> None:
    with contextlib.suppress(InvalidRequestError):
        with_field(name, value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 17}, "min_tokens=17 is more than max_tokens=16"),
        ({"min_tokens": 2, "max_tokens": 1}, "min_tokens=2 is more than max_tokens=1"),
        ({"stop": "a", "detokenize": False}, "stop strings need the text"),
        ({"top_p": 0.0}, r"top_p=0.0 is not a number in \(0, 1\]"),
        ({"temperature": -1}, r"temperature=-1 is not a number in \[0, 10000\]"),
        ({"n": 0}, rf"n=0 is not an integer in \[1, {MAX_N}\]"),
        ({"logit_bias": {7: 200}}, r"logit_bias\[7\]=200 is not a number in \[-100, 100\]"),
        ({"allowed_token_ids": []}, "leave it out to allow all"),
        ({"bad_words": "bad"}, "bad_words='bad' is not a list"),
        (
            {"ignore_eos": True, "structured_outputs": StructuredOutputsParams(regex="a")},
            "ignore_eos has no meaning with",
        ),
    ],
)
def test_the_message_says_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**fields)


def test_contradictions_that_are_none() -> None:
    SamplingParams(min_tokens=100, max_tokens=100)
    SamplingParams(min_tokens=10**6, max_tokens=None)
    SamplingParams(detokenize=False, stop=None, stop_token_ids=[1])
    SamplingParams(n=3, temperature=0.1)


def test_an_invalid_request_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(top_k=-2)


def test_lists_are_frozen_copies() -> None:
    stop, ids, bias, words = ["a"], [1, 2], {3: 1.0}, ["b"]
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias, bad_words=words, allowed_token_ids=ids)
    for mutable in (stop, ids, words):
        mutable.clear()
    bias.clear()
    assert params.stop == params.stop_strings == ("a",)
    assert params.stop_token_ids == (1, 2)
    assert params.allowed_token_ids == (1, 2)
    assert params.logit_bias == {3: 1.0}
    assert params.bad_words == ("b",)


def test_generators_are_read_once() -> None:
    assert SamplingParams(stop_token_ids=(i for i in (1, 2))).stop_token_ids == (1, 2)  # type: ignore[arg-type]


def test_stop_in_its_forms() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=None).stop_strings == ()
    assert SamplingParams().stop_strings == ()


def test_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy
    assert not SamplingParams().greedy


def test_it_is_a_value() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={1: 2.0})
    assert params == SamplingParams(temperature=0.5, stop="a", logit_bias={1: 2.0})
    assert dataclasses.replace(params, temperature=0.6) != params
    assert dataclasses.replace(params, temperature=0.5) == params
    params.top_k = 3
    assert params != SamplingParams(temperature=0.5, stop="a", logit_bias={1: 2.0})


@pytest.mark.parametrize(
    "again", [lambda params: params, copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("top_k", -2, 7),
        ("temperature", True, 1),
        ("stop", [""], ["b"]),
        ("n", 1.0, 2),
        ("logit_bias", {-1: 0.5}, {4: 0.5}),
        ("allowed_token_ids", [], [1]),
        ("min_tokens", 100, 10),
        ("structured_outputs", {"regex": "a"}, None),
    ],
)
def test_a_copy_has_values_that_were_checked(
    name: str, wrong: object, right: object, again: Callable[[SamplingParams], SamplingParams]
) -> None:
    params = again(SamplingParams(max_tokens=20, stop="a"))
    first = params.checked_copy()
    assert first == params and first is not params and vars(first).keys() == vars(SamplingParams()).keys()
    setattr(params, name, wrong)
    with pytest.raises(InvalidRequestError, match=name):
        params.checked_copy()
    setattr(params, name, right)
    assert params.checked_copy() == dataclasses.replace(params)
    assert first == SamplingParams(max_tokens=20, stop="a"), "a copy changes with the object of which it is a copy"


def test_a_bias_that_was_changed_in_place_is_checked_again() -> None:
    params = SamplingParams(logit_bias={3: 1.0})
    first = params.checked_copy()
    params.logit_bias[3] = 1000.0  # type: ignore[index]  # a dictionary
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        params.checked_copy()
    assert first.logit_bias == {3: 1.0}


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


@pytest.mark.parametrize(
    "fields",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA), "disable_any_whitespace": True},
        {"json": {}, "whitespace_pattern": " ?"},
        {"json_object": True, "disable_any_whitespace": True},
        {"regex": " "},
        {"choice": ["a", " "]},
        {"grammar": "start: /a/"},
        {"structural_tag": TAG, "disable_any_whitespace": True},
        {"json": {}, "separators": (", ", ": ")},
        {"json": {}, "separators": [",", " : "]},
    ],
)
def test_a_constraint(fields: dict[str, Any]) -> None:
    params = StructuredOutputsParams(**fields)
    assert params.constraint == next(iter(fields))
    assert SamplingParams(structured_outputs=params).structured_outputs == params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "names no constraint: give exactly one of json, json_object, regex"),
        ({"regex": "a", "choice": ["a"]}, "names regex and choice: give exactly one"),
        ({"json": {}, "json_object": True}, "names json and json_object"),
        ({"json_object": False}, "json_object=False is not True"),
        ({"json_object": 1}, "json_object=1 is not True"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": "[]"}, "json is list, not a JSON object"),
        ({"json": True}, "json is bool, not a JSON object"),
        ({"json": '{"minimum": NaN}'}, "NaN is no JSON number"),
        ({"json": {"minimum": math.inf}}, "json is not valid JSON"),
        ({"json": {"a": object()}}, "json is not valid JSON"),
        ({"json": "[" * 100_000}, "json is not valid JSON"),
        ({"json": {"a": "\ud800"}}, "json holds a lone surrogate"),
        ({"structural_tag": "x"}, "structural_tag is not valid JSON"),
        ({"regex": ""}, "regex='' is not a string with something in it"),
        ({"regex": 3}, "regex=3 is not a string"),
        ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, "regex has 1048577 characters"),
        ({"regex": "\ud800"}, "regex holds a lone surrogate"),
        ({"grammar": ""}, "grammar='' is not a string"),
        ({"choice": []}, "choice is empty"),
        ({"choice": "ab"}, "choice='ab' is not a list"),
        ({"choice": ["a", ""]}, "choice holds ''"),
        ({"choice": ["a", 1]}, "choice holds 1"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice has 10001 strings"),
        ({"choice": ["a" * 2**19, "b" * 2**19, "c"]}, "choice has 1048577 characters"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace has no meaning for regex"),
        ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern has no meaning for choice"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradict each other"),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern='' is not a string with something in it"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace=1 is not True or False"),
        ({"regex": "a", "separators": (",", ":")}, "separators has no meaning for regex"),
        ({"json": {}, "separators": (",", ":"), "disable_any_whitespace": True}, "contradict each other"),
        ({"json": {}, "separators": (",", ":"), "whitespace_pattern": " "}, "contradict each other"),
        ({"json": {}, "separators": ",:"}, "separators=',:' is not a list"),
        *[
            ({"json": {}, "separators": values}, "are not two strings, one with a comma and one with a colon")
            for values in ((), (",",), (":", ","), ("", ":"), (", a", ":"), (",", 3), (",", ":\n"), (",", ":", " "))
        ],
    ],
)
def test_constraints_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputsParams(**fields)


def test_a_constraint_is_a_frozen_value() -> None:
    schema: dict[str, Any] = {"properties": {"b": {}, "a": {}}}
    choices = ["a", "b"]
    by_schema, by_choice = StructuredOutputsParams(json=schema), StructuredOutputsParams(choice=choices)
    schema["properties"].clear()
    choices.clear()
    assert by_schema.json == '{"properties": {"b": {}, "a": {}}}'
    assert by_choice.choice == ("a", "b")
    assert hash(by_schema) != hash(by_choice)
    assert by_schema == StructuredOutputsParams(json=by_schema.json)
    assert dataclasses.replace(by_schema, disable_any_whitespace=True) != by_schema


@given(name=st.sampled_from([field.name for field in dataclasses.fields(StructuredOutputsParams)]), value=ANYTHING)
def test_no_constraint_raises_anything_else(name: str, value: object) -> None:
    fields: dict[str, Any] = {name: value}
    with contextlib.suppress(InvalidRequestError):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("a", "structured_outputs is a str; give a JSON object"),
        ([], "structured_outputs is a list; give a JSON object"),
        ({"regexp": "a"}, "structured_outputs has no 'regexp'; did you mean 'regex'"),
        ({}, "names no constraint"),
    ],
)
def test_json_that_is_no_constraint(values: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputsParams.from_json(values)


def test_a_constraint_from_json() -> None:
    given = {"json": SCHEMA, "separators": [", ", ": "], "lenient": True}
    found = StructuredOutputsParams.from_json(given)
    assert (found.constraint, found.separators, found.lenient) == ("json", (", ", ": "), True)
    assert StructuredOutputsParams(regex="a" * MAX_GRAMMAR_LENGTH).constraint == "regex"
    assert StructuredOutputsParams(choice=["a" * 2**19, "b" * 2**19]).constraint == "choice"
    assert StructuredOutputsParams(choice=["a"] * MAX_CHOICES).constraint == "choice"
    blanks = " " * 64
    assert StructuredOutputsParams(json={}, separators=(f"{blanks},{blanks}", f"{blanks}:")).separators is not None
    with pytest.raises(InvalidRequestError, match="are not two strings"):
        StructuredOutputsParams(json={}, separators=(f"{blanks} ,", ":"))
