"""`setting`: what is refused, with which words, and what a class of settings says about its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from inflight.config.text_values import read_texts
from inflight.setting import check_values, names_unknown, setting, settings_of, unknown_name


@dataclass(frozen=True, kw_only=True)
class Example:
    count: int = setting(1, "How many.", bounds=(1, 9))
    share: float | None = setting(0.5, "Which part.", bounds=(0.0, 1.0), excludes_low=True)
    wait: float = setting(1.0, "How long.")
    color: str | None = setting(None, "Which color.", choices=(None, "red", "blue"))
    name: str = setting("x", "What it is called.")
    note: str = setting("", "More words.")
    switch: bool = setting(False, "Whether.")
    perhaps: bool | None = setting(None, "Whether, if that is known.")
    keys: tuple[str, ...] = setting((), "Secrets.", is_secret=True)
    words: str | Sequence[str] | None = setting((), "Words.")
    more: Mapping[str, Any] | None = setting(None, "Anything.")
    plain: int = 3


@pytest.mark.parametrize(
    ("name", "good", "bad", "allowed"),
    [
        ("count", [1, 9], [0, 10, True, 1.0, "1", None], "an integer in [1, 9]"),
        ("share", [1, 0.1, None], [0, 0.0, 1.1, math.nan, True, "1"], "a number in (0, 1]"),
        ("wait", [0, -1.5, math.inf], [math.nan, "1", None], "a number in [-inf, inf]"),
        ("color", ["red", None], ["green", 1, ["red"]], "one of 'red', 'blue'"),
        ("name", ["a"], ["", " ", 1, None], "a text with something in it"),
        ("note", ["a", ""], [1, None], "a text"),
        ("switch", [True, False], [0, "yes", None], "True or False"),
        ("perhaps", [True, False, None], [0, "yes"], "True, False or None"),
        ("more", [{}, {"a": 1}, None], [[], "a"], "a dictionary"),
    ],
)
def test_values(name: str, good: list[object], bad: list[object], allowed: str) -> None:
    assert [check_values(Example, {name: value}) for value in good] == [{}] * len(good)
    for value in bad:
        assert check_values(Example, {name: value}) == {name: f"{name}={value!r} is not {allowed}"}


def test_a_secret_is_not_shown() -> None:
    assert "key-1" not in repr(Example(keys=("key-1",)))
    assert check_values(Example, {"keys": ["key-1"]}) == {"keys": "keys is not a tuple of texts with something in them"}
    assert check_values(Example, {"keys": ("key-1",)}) == {}


def test_all_wrong_values_are_named() -> None:
    assert list(check_values(Example, vars(replace(Example(), count=0, name="", words=5)))) == ["count", "name"]  # type: ignore[arg-type]


def test_what_a_class_says_about_its_fields() -> None:
    found = settings_of(Example)
    assert "plain" not in found
    assert (found["share"].type, found["share"].is_optional, found["share"].default) == (float, True, 0.5)
    assert (found["words"].type, found["words"].element, found["keys"].element) == (None, str, str)
    assert found["count"].help == "How many."


def test_a_name_that_there_is_not() -> None:
    assert unknown_name(Example, ["count", "plain"]) == ""
    assert unknown_name(Example, ["count", "colour"]) == "'colour'; did you mean 'color'?"
    assert unknown_name(Example, ["zzz"]).startswith("'zzz'; known are count, share, ")


def _parse_number(text: str) -> int:
    return int(text, 16)


@dataclass(kw_only=True)
class Sizes:
    size: int = setting(1, "How large.", parse=_parse_number)
    name: str = setting("a", "What it is called.")


def test_texts_are_read_as_on_the_command_line() -> None:
    assert read_texts(Sizes, {"size": "ff", "name": "ff"}) == ({"size": 255}, {})
    assert read_texts(Sizes, {"size": 5}) == ({}, {})
    found, problems = read_texts(Sizes, {"size": "zz"})
    assert found == {} and list(problems) == ["size"]


def test_a_class_that_names_unknown_keywords() -> None:
    kind = names_unknown(KeyError, {"length": "give size"})(Sizes)
    assert kind(size=3) == replace(kind(size=1), size=3)
    assert kind(length=None, size=2).size == 2  # type: ignore[call-arg]
    for given, words in (({"length": 3}, "give size"), ({"sise": 3}, "did you mean 'size'"), ({"sise": None}, "sise")):
        with pytest.raises(KeyError, match=words):
            kind(**given)
    with pytest.raises(KeyError, match="by name, as in size="):
        kind(3)  # type: ignore[call-arg]
