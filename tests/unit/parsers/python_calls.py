"""Random calls that are written as in Python, and the same calls with one damage."""

from __future__ import annotations

import random
from typing import Any

_TEXTS = [
    "Oslo",
    "",
    "it is",
    "a, b",
    "(x)",
    "[1, 2]",
    "n=3",
    "{k: v}",
    "don't",
    "# no",
    "é 東京",
    "x = 'y'",
    'say "hi"',
    "a\nb",
    "\\d",
]
_NAMES = ["s", "n", "o", "b"]
Piece = tuple[str, bool]  # a text, and whether it is a quote, a bracket or a comma


def random_arguments(rng: random.Random) -> dict[str, Any]:
    return {name: random_value(rng, 0) for name in _NAMES[: rng.randint(0, 4)]}


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randint(0, 5 if depth < 3 else 3)
    if kind == 0:
        return rng.choice([0, -7, 12, 2.5, 1e-9])
    if kind == 1:
        return rng.choice([True, False, None])
    if kind < 4:
        return rng.choice(_TEXTS)
    if kind == 4:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(_TEXTS): random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def written(rng: random.Random, name: str, arguments: dict[str, Any]) -> list[Piece]:
    """The call in Python, in pieces."""
    pieces: list[Piece] = [(name, False), ("(", True)]
    for i, (key, value) in enumerate(arguments.items()):
        pieces += [*_comma(rng, i), (key, False), ("=", False), *_value(rng, value)]
    return [*pieces, (")", True)]


def _comma(rng: random.Random, i: int) -> list[Piece]:
    return [(",", True), (rng.choice(["", " "]), False)] if i else []


def _value(rng: random.Random, value: Any) -> list[Piece]:
    if isinstance(value, str):
        quote = rng.choice("\"'")
        body = value.replace("\\", "\\\\").replace("\n", "\\n").replace(quote, f"\\{quote}")
        return [(quote, True), (body, False), (quote, True)]
    if isinstance(value, list):
        items = [piece for i, each in enumerate(value) for piece in (*_comma(rng, i), *_value(rng, each))]
        return [("[", True), *items, ("]", True)]
    if isinstance(value, dict):
        items = [
            piece
            for i, (key, each) in enumerate(value.items())
            for piece in (*_comma(rng, i), *_value(rng, key), (":", False), (" ", False), *_value(rng, each))
        ]
        return [("{", True), *items, ("}", True)]
    return [(repr(value), False)]


def damaged(rng: random.Random, pieces: list[Piece]) -> tuple[str, str]:
    """One piece of the markup is dropped, doubled or moved; or a comment or a line break is put somewhere between two pieces.
    Returns the kind of the damage, and the text."""
    places = [i for i, (_, is_markup) in enumerate(pieces) if is_markup and i > 1]
    at = rng.choice(places)
    texts = [text for text, _ in pieces]
    kind = rng.choice(["dropped", "doubled", "moved", "comment", "line break"])
    if kind == "dropped":
        texts[at] = ""
    elif kind == "doubled":
        texts[at] *= 2
    elif kind == "moved":
        mark, texts[at] = texts[at], ""
        rest = "".join(texts[at:])
        distance = rng.randint(1, 3)
        texts[at:] = [rest[:distance], mark, rest[distance:]]
    elif texts[at] not in "\"'":  # behind a quote a string may begin
        texts[at] += "# note\n" if kind == "comment" else "\n"
    return kind, "".join(texts)
