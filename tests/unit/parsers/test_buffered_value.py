"""When a value without quotes is passed on, and as what. What its JSON is, is in test_output_parser.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from inflight.parsers import buffered_value
from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.buffered_value import BufferedValue


def passed_on(pieces: Sequence[str], *, is_cut: bool = False, **options: Any) -> list[str]:
    """What had been passed on when the value began, after each piece, and at its end."""
    written: list[str] = []
    value = BufferedValue(written.append, lambda text: f"converted {text}", **options)
    found = ["".join(written)]
    for piece in pieces:
        value.write(piece)
        found.append("".join(written))
    value.end(is_cut=is_cut)
    return [*found, "".join(written)]


def test_a_string_is_passed_on_at_once() -> None:
    assert passed_on(['a"', "ü\n"], is_string=True) == ['"', '"a\\"', '"a\\"ü\\n', '"a\\"ü\\n"']
    assert passed_on(["ab"], is_string=True, is_cut=True)[-1] == '"ab'


def test_another_value_is_held_to_its_end() -> None:
    assert passed_on(["[1", ", 2]"]) == ["", "", "", "converted [1, 2]"]
    assert passed_on(["[1", ", "], is_cut=True)[-1] == "[1, "


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["n", "ull"], ["", "", "", "converted null"]),
        (["nu", 'x"'], ["", "", '"nux\\"', '"nux\\""']),
        (["nulls", "a"], ["", '"nulls', '"nullsa', '"nullsa"']),
        (["None"], ["", "", "converted None"]),
        ([""], ["", "", "converted "]),
    ],
)
def test_a_string_is_held_while_it_may_still_become_null(pieces: list[str], expected: list[str]) -> None:
    assert passed_on(pieces, is_string=True, unless=("null", "None")) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["[1,"], ["", "", "converted [1,"]),
        (["[1,2", ",3]"], ["", "[1,2", "[1,2,3]", "[1,2,3]"]),  # four characters are held
        (["[1,2,3", "]"], ["", "[1,2,3", "[1,2,3]", "[1,2,3]"]),
        (["[1", ",2,3", "]"], ["", "", "[1,2,3", "[1,2,3]", "[1,2,3]"]),
        (["  [] ", " "], ["", "  [] ", "  []  ", "  []  "]),
        (["[1] ", "see"], ["", "[1] ", "[1] see", "[1] see"]),  # what comes after the held characters is not known
        (["[1]s", "ee"], ["", '"[1]s', '"[1]see', '"[1]see"']),
        (["[] s", "ee"], ["", '"[] s', '"[] see', '"[] see"']),
        (['"a"b', "c"], ["", '"\\"a\\"b', '"\\"a\\"bc', '"\\"a\\"bc"']),
        (
            ["1\u00a0\u00a0\u00a0", "\u00a0"],
            ["", '"1\u00a0\u00a0\u00a0', '"1' + "\u00a0" * 4, '"1' + "\u00a0" * 4 + '"'],
        ),
        (["12 a", "b"], ["", '"12 a', '"12 ab', '"12 ab"']),
        (['a"bcd', "e"], ["", '"a\\"bcd', '"a\\"bcde', '"a\\"bcde"']),
    ],
)
def test_a_value_that_is_too_long_to_hold(
    monkeypatch: pytest.MonkeyPatch, pieces: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(buffered_value, "MAX_BUFFERED", 4)
    assert passed_on(pieces) == expected


@pytest.mark.parametrize(
    ("schema", "pieces", "expected"),
    [
        ({"type": "string"}, ["nu", "ll"], ['"', '"nu', '"null', '"null"']),
        ({"type": ["string", "null"]}, ["nu", "ll"], ["", "", "", "null"]),
        ({"type": ["string", "null"]}, ["nu", "x"], ["", "", '"nux', '"nux"']),
        ({"type": ["string", "integer"]}, ["1", "2"], ["", "", "", '"12"']),
        ({"type": "null"}, ["null"], ["", "", "null"]),
        ({"type": "integer"}, ["1"], ["", "", "1"]),
        ({}, ["a"], ["", "", '"a"']),
        ({"type": ["string", "null"]}, ["nu", "t", "s"], ["", "", '"nut', '"nuts', '"nuts"']),
        (None, ["a"], ['"', '"a', '"a"']),  # the tool has no such argument
        (None, ['a"', "b"], ['"', '"a\\"', '"a\\"b', '"a\\"b"']),
    ],
)
def test_the_schema_says_which_values_are_written_before_they_end(
    schema: Any, pieces: list[str], expected: list[str]
) -> None:
    written: list[str] = []
    value = ArgumentSchema(schema, schema).buffered_value(written.append)
    found = ["".join(written)]
    for piece in pieces:
        value.write(piece)
        found.append("".join(written))
    value.end()
    assert [*found, "".join(written)] == expected
