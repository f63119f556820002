"""`TextReader`: what it consumes and returns, however the text is split."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from inflight.parsers.text_reader import Following, Literals, Steps, TextReader

T = TypeVar("T")
MAX_BLANKS = 256


def splits(text: str) -> Iterator[list[str]]:
    """The text as a whole, in two pieces, and in single characters."""
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield list(text)


def read(ask: Callable[[TextReader], Steps[T]], pieces: list[str], *, is_cut: bool = False) -> tuple[T, str, int]:
    """Returns what the generator returns, the text that is left, and how many pieces the generator has asked for."""
    reader = TextReader()
    steps, count = ask(reader), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            for piece in pieces[count:]:
                reader.push(piece)
            rest: list[str] = []
            reader.finish(is_cut=is_cut)
            with pytest.raises(StopIteration):
                next(reader.all(rest.append))
            return end.value, "".join(rest), count
        assert count <= len(pieces), "it waits for ever"
        if count == len(pieces):
            reader.finish(is_cut=is_cut)
        else:
            reader.push(pieces[count])
        count += 1


LITERALS = ("<tool>", "</a>")


@pytest.mark.parametrize(
    ("text", "literals", "found"),
    [
        ("<tool>x", LITERALS, "<tool>"),
        ("</a>", LITERALS, "</a>"),
        ("</b>", LITERALS, ""),
        ("x</a>", LITERALS, ""),
        ("</a", LITERALS, ""),
        ("", LITERALS, ""),
        ("ab", ("abc", "ab"), "ab"),
    ],
)
def test_a_literal_that_comes_next(text: str, literals: tuple[str, ...], found: str) -> None:
    for pieces in splits(text):
        assert read(lambda reader: reader.comes(*literals), pieces)[:2] == (found, text), pieces
        assert read(lambda reader: reader.literal(*literals), pieces)[:2] == (found, text[len(found) :]), pieces


def test_a_reader_asks_for_no_more_text_than_it_needs_to_decide() -> None:
    assert read(lambda reader: reader.comes("<tool>", "</a>"), ["<", "x", "y"])[2] == 2
    assert read(lambda reader: reader.comes("<tool>", "</a>"), ["<", "/", "a", ">", "y"])[2] == 4
    assert read(lambda reader: reader.comes("ab"), ["b", "y"])[2] == 1
    assert read(lambda reader: reader.comes("ab"), ["a"]) == ("", "a", 2)


def test_until_a_marker() -> None:
    for text, marker, before, rest in (
        ("a<b</a>c", "</a>", "a<b", "c"),
        ("a<b", "", "a<b", ""),
        ("</a>", "</a>", "", ""),
        ("a</", "", "a</", ""),
        ("]x[end]", "[end]", "]x", ""),
    ):
        for pieces in splits(text):
            written: list[str] = []
            found = read(lambda reader: reader.until(written.append, "</a>", "[end]"), pieces)  # noqa: B023
            assert (*found[:2], "".join(written)) == (marker, rest, before), pieces


@pytest.mark.parametrize(
    ("limit", "pieces", "found", "rest"),
    [
        (None, ["abc<", "d"], "abc", "<d"),
        (2, ["abc<", "d"], "ab", "c<d"),
        (9, ["ab", "c<"], "ab", "c<"),
        (None, ["<a"], "", "<a"),
        (None, [], "", ""),
    ],
)
def test_a_piece_of_a_run(limit: int | None, pieces: list[str], found: str, rest: str) -> None:
    run = re.compile("[^<]+")
    assert read(lambda reader: reader.piece(run, limit), pieces)[:2] == (found, rest)


@pytest.mark.parametrize(
    ("text", "is_cut", "next_char", "is_at_cut"),
    [("", False, "", False), ("", True, "", True), ("a", True, "a", False), ("a", False, "a", False)],
)
def test_the_end_of_the_text_and_its_cut(text: str, is_cut: bool, next_char: str, is_at_cut: bool) -> None:
    assert read(TextReader.peek, [text], is_cut=is_cut)[:2] == (next_char, text)
    assert read(TextReader.is_at_cut, [text], is_cut=is_cut)[0] == is_at_cut


@pytest.mark.parametrize(
    ("text", "found", "rest"),
    [("xy</", "</", ""), ("xy", "", ""), ("xy</b", None, "</b"), ("xy</a>", "</a>", ""), ("xy</a>b", None, "</a>b")],
)
def test_a_literal_that_the_end_of_the_text_has_cut(text: str, found: str | None, rest: str) -> None:
    reader = TextReader()
    reader.push(text)
    assert reader.take(2) == "xy"
    assert reader.take_cut("</a>", "<b>") is None, "more text may come"
    reader.finish()
    assert reader.take_cut("</a>", "<b>") == found
    written: list[str] = []
    for _ in reader.all(written.append):
        pass
    assert "".join(written) == rest


def test_what_is_put_back_comes_again_before_the_rest() -> None:
    reader = TextReader()
    reader.push("abcd")
    reader.put_back(reader.take(2).upper())
    reader.push("e")
    assert reader.take(5) == "ABcde"
    with pytest.raises(AssertionError):
        reader.take(1)


NAME: Following = {'"': {'name"': None, 'arguments"': {":": None}}, "[": {"{": None}}


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('"name" x', True),
        (' \n"  name"', True),
        ('"arguments" :', True),
        ('"arguments" x', False),
        ('"arguments"', True),
        ('"arg', True),
        ('"args', False),
        ("[ {", True),
        ("[ [", False),
        ("", True),
        ("  ", True),
        ("x", False),
        (" " * (MAX_BLANKS - 1) + "x", False),
        (" " * MAX_BLANKS + "x", True),
    ],
)
def test_what_follows(text: str, follows: bool) -> None:
    """Nothing is consumed."""
    for pieces in [[text]] if len(text) > MAX_BLANKS - 2 else splits(text):
        found: tuple[Any, ...] = read(lambda reader: reader.follows(NAME), pieces)
        assert found[:2] == (follows, text), pieces


def test_one_of_many_literals() -> None:
    literals = Literals(["<a>", "<ab>", "<b", "<abc>"])
    assert literals.longest == 5
    assert [literals.at("x<ab><b<a>", position) for position in range(10)] == [
        "",
        "<ab>",
        "",
        "",
        "",
        "<b",
        "",
        "<a>",
        "",
        "",
    ]
    assert [text for text in ("", "<", "<a", "<ab", "<abd", "<abc>", "a") if literals.may_begin_with(text)] == [
        "",
        "<",
        "<a",
        "<ab",
        "<abc>",
    ]
    assert Literals([]).longest == 0 and not Literals([]).may_begin_with("<") and not Literals([]).at("<", 0)


@pytest.mark.parametrize("num_chars", [1, 2, 20])
def test_one_of_many_literals_comes_in_pieces(num_chars: int) -> None:
    reader = TextReader()
    found: list[str] = []

    def steps() -> Steps[None]:
        while (yield from reader.peek()):
            literal = yield from reader.comes_of(Literals(["<ab>", "<b>"]), 1)
            found.append(literal)
            reader.take(1)

    run = steps()
    next(run)
    text = "x<ab>.<a<b>"
    for i in range(0, len(text), num_chars):
        reader.push(text[i : i + num_chars])
        next(run)
    reader.finish()
    assert list(run) == []
    assert found == ["<ab>", "", "", "", "", "", "", "<b>", "", "", ""]
