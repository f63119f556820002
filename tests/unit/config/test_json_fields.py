"""Fields of JSON files of models: what is read, and what is refused with the field's name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from inflight.config.json_fields import MOST_LAYERS, JsonFields
from inflight.errors import UnsupportedModelError


def of(value: object) -> JsonFields:
    return JsonFields({"x": value}, "config.json of a test")


INTEGER: Callable[[JsonFields], object] = lambda fields: fields.integer("x")  # noqa: E731
COUNT: Callable[[JsonFields], object] = lambda fields: fields.integer("x", least=0)  # noqa: E731
READERS: dict[str, tuple[Callable[[JsonFields], object], list[Any], list[Any], str]] = {
    "integer": (INTEGER, [1, 7], [0, -1, True, 1.0, "1", [1]], "a positive integer"),
    "count": (COUNT, [0, 7], [-1, False, 0.0], "an integer of at least 0"),
    "number": (
        lambda fields: fields.number("x"),
        [0.5, 2],
        [0, -1.5, math.inf, math.nan, True, "1"],
        "a positive number",
    ),
    "boolean": (lambda fields: fields.boolean("x", True), [True, False], [0, "true", []], "true or false"),
    "text": (lambda fields: fields.text("x"), ["", "a"], [1, ["a"]], "a string"),
    "texts": (
        lambda fields: list(fields.texts("x")),
        [[], ["a", "b"]],
        ["a", ["a", 1], {"a": "b"}],
        "a list of strings",
    ),
    "numbers": (
        lambda fields: list(fields.numbers("x")),
        [[1.0], [0.5, 2.0]],
        [[], 1.0, [0], [math.inf], [True], ["1"]],
        "a list of positive numbers",
    ),
    "mapping": (lambda fields: fields.mapping("x").values, [{}, {"a": 1}], [[], "a", 1], "an object"),
    "token_ids": (
        lambda fields: list(fields.token_ids("x")),
        [[], [0, 7]],
        ["1", True, [True], [-1], [1.0], -2, {"a": 1}],
        "a token id or a list of them",
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_values(kind: str) -> None:
    read, good, bad, wanted = READERS[kind]
    assert [read(of(value)) for value in good] == good
    for value in bad:
        with pytest.raises(UnsupportedModelError) as caught:
            read(of(value))
        assert str(caught.value) == f"config.json of a test: x={value!r} is not {wanted}"


@pytest.mark.parametrize("values", [{}, {"x": None}])
def test_a_field_that_is_null_is_absent(values: dict[str, object]) -> None:
    fields = JsonFields(values)
    assert not fields.has("x") and fields.is_null("x") == ("x" in values)
    assert (fields.integer("x", 3), fields.number("x", 0.5), fields.boolean("x", True), fields.text("x", "a")) == (
        3, 0.5, True, "a",
    )  # fmt: skip
    assert (fields.texts("x"), fields.name_or_names("x"), fields.token_ids("x"), fields.mapping("x").values) == (
        (), (), (), {},
    )  # fmt: skip
    for read in (INTEGER, READERS["number"][0], READERS["text"][0]):
        with pytest.raises(UnsupportedModelError, match=r"config.json: x is missing"):
            read(fields)


def test_what_one_value_may_stand_for() -> None:
    assert (of(5).token_ids("x"), of(0).token_ids("x"), of(-1).token_ids("x")) == ((5,), (0,), ())
    assert (of("a").name_or_names("x"), of(["a", "b"]).name_or_names("x")) == (("a",), ("a", "b"))


def test_errors_of_a_nested_object_say_where_it_is() -> None:
    inner = JsonFields({"x": {"y": 0}}, "a.json").mapping("x")
    with pytest.raises(UnsupportedModelError, match=r"^a.json: x: y=0 is not a positive integer$"):
        inner.integer("y")


def test_other_values_may_be_laid_over_an_object() -> None:
    fields = JsonFields({"x": 1, "y": 2}, "a.json").with_values({"x": 3, "z": 4})
    assert fields == JsonFields({"x": 3, "y": 2, "z": 4}, "a.json")


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"])
def test_a_damaged_number_of_layers_does_not_fill_the_memory(name: str) -> None:
    assert JsonFields({name: MOST_LAYERS}).integer(name) == MOST_LAYERS
    with pytest.raises(UnsupportedModelError, match=f"{name}=10001 "):
        JsonFields({name: MOST_LAYERS + 1}).integer(name)
    assert of(MOST_LAYERS + 1).integer("x") == MOST_LAYERS + 1
