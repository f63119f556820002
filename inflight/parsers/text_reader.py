"""`TextReader`: text that arrives in pieces, read by generators that pause where a piece ends.

A parser is written as if all text were there; where it is not, its generator yields, and goes on when more was pushed. So what
it finds does not depend on how the text was split, as long as it looks through these methods only. Each character is looked
at a bounded number of times: what waits here between two pushes is a proper prefix of a literal that was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")

Steps = Generator[None, None, _T]  # yields where it needs more text, and returns a T


class TextReader:
    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_finished = False

    def push(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def finish(self) -> None:
        """No more text will come."""
        self._is_finished = True

    def peek(self) -> Steps[str]:
        """The next character; "" at the end of all text."""
        while self._position == len(self._text):
            if self._is_finished:
                return ""
            yield
        return self._text[self._position]

    def take(self, num_chars: int) -> str:
        """Consume characters that a `peek` or `literal` has found."""
        start = self._position
        self._position += num_chars
        assert self._position <= len(self._text)
        return self._text[start : self._position]

    def piece(self, run: re.Pattern[str], limit: int | None = None) -> Steps[str]:
        """Consume what has arrived of the longest run of `run`, at most `limit` characters; "" where none follows.

        `run` is one class of characters, repeated: "[^<]+". One that goes on in the next push is given in pieces.
        """
        if not (yield from self.peek()):
            return ""
        end = len(self._text) if limit is None else self._position + limit
        found = run.match(self._text, self._position, end)
        return self.take(found.end() - self._position) if found else ""

    def take_cut(self, *literals: str) -> str | None:
        """If the text ends at the beginning of one of `literals`, or within it, consume the rest and return it; else None."""
        rest = self._text[self._position :]
        is_cut = self._is_finished and any(literal.startswith(rest) for literal in literals)
        return self.take(len(rest)) if is_cut else None

    def literal(self, *literals: str) -> Steps[str]:
        """Consume the first of `literals` that the text goes on with; "" as soon as it is sure that there is none."""
        while True:
            num_left = len(self._text) - self._position
            is_open = False
            for literal in literals:
                if self._text.startswith(literal, self._position):
                    return self.take(len(literal))
                is_open |= num_left < len(literal) and literal.startswith(self._text[self._position :])
            if not is_open or self._is_finished:
                return ""
            yield
