"""Valid calls that are damaged once, and which readings a damaged call has: found by trying all single edits with a strict
parser, without the code under test."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

GEMMA_QUOTE = '<|"|>'
JSON_SIGNS = ',:"{}[]'
_WORDS = "Oslo Rome rm -rf build it's x y path/to/file a=b 10:30 (ok) é 東京 🙂".split()
_KEYS = "city n path command items options flag text ratio cwd".split()
_NOTES = ("/* note */", "/* a, b */", "// note\n", "# note\n", "\n", "\n\n  ")
Call = tuple[str, dict[str, Any]]  # Any: JSON


@dataclass(frozen=True)
class Damage:
    """
    Attributes:
        kind: what was done.
        text: the damaged text.
        is_clear: whether the text has one reading by its nature, such as a call with a comment in it.
    """

    kind: str
    text: str
    is_clear: bool


def random_arguments(draw: random.Random) -> dict[str, Any]:
    return {key: _value(draw, 0) for key in draw.sample(_KEYS, draw.randint(1, 4))}


def _value(draw: random.Random, depth: int) -> Any:
    kinds: list[Callable[[random.Random], Any]] = [
        _text,
        _text,
        lambda _: draw.randint(-20, 3000),
        lambda _: draw.choice([True, False, None, 1.5, -2e-7]),
    ]
    if depth < 2:
        kinds += [
            lambda _: [_value(draw, depth + 1) for _ in range(draw.randint(0, 3))],
            lambda _: {key: _value(draw, depth + 1) for key in draw.sample(_KEYS, draw.randint(0, 3))},
        ]
    return draw.choice(kinds)(draw)


def _text(draw: random.Random) -> str:
    words = " ".join(draw.choices(_WORDS, k=draw.randint(0, 4)))
    return words + draw.choice(["", "", "", ", and more", "\nnext line", ' "quoted" text', "; done", " {x: [1]}"])


def damages(text: str, draw: random.Random, *, signs: str = JSON_SIGNS, quote: str = '"') -> Iterator[Damage]:
    """One damage of each kind. `text`: JSON, or the same with another quote."""
    pieces = _pieces(text, quote)
    places = [i for i, piece in enumerate(pieces) if piece in signs or piece == quote]
    at = draw.choice(places)
    sign = pieces[at]
    yield Damage("dropped", "".join(pieces[:at] + pieces[at + 1 :]), is_clear=False)
    yield Damage("doubled", "".join([*pieces[:at], sign, *pieces[at:]]), is_clear=False)
    rest = pieces[:at] + pieces[at + 1 :]
    to = min(max(at + draw.choice([-3, -2, -1, 1, 2, 3]), 0), len(rest))
    yield Damage("moved", "".join([*rest[:to], sign, *rest[to:]]), is_clear=False)
    gaps = _gaps(pieces, quote)
    gap = draw.choice(gaps)
    yield Damage("note", "".join([*pieces[:gap], draw.choice(_NOTES), *pieces[gap:]]), is_clear=True)
    ends = [i for i in gaps if i < len(pieces) and pieces[i] in "]}" and "".join(pieces[:i]).rstrip()[-1] not in "[{"]
    if ends:
        end = draw.choice(ends)
        yield Damage("comma at the end", "".join([*pieces[:end], ",", *pieces[end:]]), is_clear=", " in text)
    commas = [i for i in gaps if i < len(pieces) and pieces[i] == ","]
    if commas:
        comma = draw.choice(commas)
        yield Damage("semicolon", "".join([*pieces[:comma], ";", *pieces[comma + 1 :]]), is_clear=True)
        line = [*pieces[:comma], "\n", *pieces[comma + 1 :]]
        yield Damage("line break for comma", "".join(line), is_clear=False)


def python_forms(arguments: object) -> Iterator[Damage]:
    yield Damage("Python", repr(arguments), is_clear=True)
    bare = re.sub(r'"([a-z]+)": ', r"\1: ", json.dumps(arguments, ensure_ascii=False))
    yield Damage("keys without quotes", bare, is_clear='\\"' not in bare)


def _pieces(text: str, quote: str) -> list[str]:
    """The text in single characters, but an escape and the quote are one piece."""
    return re.findall(rf"{re.escape(quote)}|\\u....|\\.|.", text, re.DOTALL)


def _gaps(pieces: list[str], quote: str) -> list[int]:
    """Where something may be put in outside strings and words."""
    found, is_inside = [], False
    for i, piece in enumerate(pieces):
        if piece == quote:
            is_inside = not is_inside
            if is_inside:
                found.append(i)
        elif not is_inside and piece in ",:{}[]" and i:
            found.append(i)
    return found


def readings(text: str, parse: Callable[[str], object], signs: str = JSON_SIGNS) -> list[object]:
    """The different values from which one damage leads to this text: a sign is added, taken away or moved. `parse` returns None
    for what is not valid."""
    found: dict[str, object] = {}

    def note(edited: str) -> None:
        value = parse(edited)
        if value is not None:
            found[json.dumps(value, sort_keys=True)] = value

    cut = [(i, text[:i] + text[i + 1 :], text[i]) for i in range(len(text)) if text[i] in signs]
    for _, edited, _ in cut:
        note(edited)
    for i in range(len(text) + 1):
        for sign in signs:
            note(text[:i] + sign + text[i:])
    for _, shorter, sign in cut:
        for i in range(len(shorter) + 1):
            note(shorter[:i] + sign + shorter[i:])
    return list(found.values())


def parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parse_call(text: str) -> Call | None:
    """A call that is a JSON object with a name and arguments, and nothing else."""
    value = parse_object(text)
    if value is None or set(value) not in ({"name", "arguments"}, {"name", "parameters"}):
        return None
    name, arguments = value.values()
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def as_gemma(value: object) -> str:
    """The text of a value as Gemma 4 writes it: keys have no quotes, and strings have quotes of their own."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_gemma(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_gemma, value)) + "]"
    return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if isinstance(value, str) else json.dumps(value)


def parse_gemma(text: str) -> dict[str, Any] | None:
    """The object that `as_gemma` has written; None if the text is not exactly in that form."""
    pieces = re.split(r'<\|"\|>(.*?)<\|"\|>', text, flags=re.DOTALL)
    if any('"' in piece for piece in pieces[::2]):
        return None
    pieces[::2] = [re.sub(r"([A-Za-z]+):", r'"\1":', piece) for piece in pieces[::2]]
    pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
    return parse_object("".join(pieces))
