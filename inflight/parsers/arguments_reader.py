"""`ArgumentsReader`: reads the arguments of a call as models write them, and writes an object of JSON.

Valid JSON is written unchanged. Otherwise as little as possible is added and left out, so that the result is valid:

- In a string, line breaks and other control characters are escaped. So is a backslash that begins no escape, and a quote that
  cannot be the end of the string, because no comma, colon or bracket follows it.
- Strings in single quotes, and the words `True`, `False` and `None`, become JSON. Other words without quotes become strings.
- A missing comma, colon, value or bracket is added; one that is too much is left out. So is white space that JSON does not
  know, such as a no-break space.

All of this is done while the text arrives. Only a word without quotes, a comma and the end of a string are held back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.event_writer import MAX_HELD
from inflight.parsers.held_value import HeldValue, escaped
from inflight.parsers.text_reader import BLANKS, Steps, TextReader

_PLAIN = {quote: re.compile(rf'[^{quote}"\\\x00-\x1f]+') for quote in "\"'"}
_HEX = re.compile(r"[0-9a-fA-F]+")
_ESCAPES = {**{char: f"\\{char}" for char in '"\\/bfnrt'}, "'": "'"}
_MAX_KEY = 1000  # characters of a key that are kept, to find its schema
_NUM_HEX = {"u": 4, "x": 2}
_MAX_COMMA = 1000  # characters of a comma and the white space after it; further white space is left out
_BLANKS = " \t\r\n"
_AFTER_WORD = (",", "}", "]")
_CLOSING = {"{": "}", "[": "]"}


class _Next(Enum):
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


@dataclass(slots=True)
class _Level:
    """An object or a list whose end has not come yet, and what must come next in it."""

    opening: str
    next: _Next
    schema: ArgumentSchema  # of the object or the list
    value_schema: ArgumentSchema  # of the next value in it


class ArgumentsReader:
    """
    Args:
        stops: texts that end the arguments, even if brackets are open. In a string they do not count.
        quote: the family's own quote, around strings without escapes; "" if there is none. With such a quote the text is not
            JSON: white space outside strings has no meaning, and words without quotes may have spaces.
        schema: the schema of the arguments. It decides the types of values, but only if there is a `quote`.
    """

    def __init__(
        self,
        reader: TextReader,
        write: Callable[[str], None],
        stops: tuple[str, ...] = (),
        *,
        quote: str = "",
        schema: ArgumentSchema | None = None,
    ) -> None:
        self._reader = reader
        self._write = write
        self._stops = stops
        self._quotes = (quote, *_PLAIN) if quote else tuple(_PLAIN)
        self._quote = quote
        self._ends = (*stops, quote) if quote else stops  # texts that end a word without quotes
        self._first = {end[0] for end in self._ends}
        self._quote_starts = {quote[0] for quote in self._quotes}
        first = "".join(map(re.escape, sorted(self._first)))
        self._run = re.compile(rf"[^{{}}\[\],:\"{first}]+")
        self._after_string = dict.fromkeys((*",:}]", *stops))
        self._levels: list[_Level] = []
        self._num_open = {"{": 0, "[": 0}
        self._comma = ""  # a comma and the white space after it, until it is certain that something follows
        self._schema = schema or ArgumentSchema()

    def read(self) -> Steps[None]:
        """Read an object, whose brace comes next. If a limit has cut the text, the object is not completed."""
        self._open(self._reader.take(1), self._schema)
        while self._levels:
            char = yield from self._reader.peek()
            if not char or (char in self._first and (yield from self._reader.comes(*self._stops))):
                break
            if char in _BLANKS:
                self._blanks((yield from self._reader.piece(BLANKS)))
            elif char.isspace():  # not white space in JSON
                self._reader.take(1)
            elif char in "{[":
                self._reader.take(1)
                level = self._levels[-1]
                if level.opening == "[" or level.next in (_Next.COLON, _Next.VALUE):  # in place of a key it is left out
                    self._open(char, self._begin_value())
            elif char in "}]":
                self._close(self._reader.take(1))
            elif char == ",":
                self._take_comma()
            elif char == ":":
                self._take_colon()
            elif char in self._quote_starts and (quote := (yield from self._reader.literal(*self._quotes))):
                yield from self._string(quote)
            else:
                yield from self._word()
        if self._levels and (yield from self._reader.is_at_cut()):
            self._write(self._comma)
            return
        while self._levels:
            self._close(_CLOSING[self._levels[-1].opening])

    # -- brackets, commas and colons -----------------------------------------------------------------------------------

    def _blanks(self, text: str) -> None:
        if self._quote:
            return
        if not self._comma:
            self._write(text)
        else:
            self._comma = (self._comma + text)[:_MAX_COMMA]

    def _open(self, bracket: str, schema: ArgumentSchema) -> None:
        first = _Next.KEY if bracket == "{" else _Next.VALUE
        self._levels.append(_Level(bracket, first, schema, schema.item() if bracket == "[" else schema))
        self._num_open[bracket] += 1
        self._write(bracket)

    def _close(self, bracket: str) -> None:
        opening = "{" if bracket == "}" else "["
        if not self._num_open[opening]:
            return  # this bracket could close nothing, and is left out
        closed = ""
        while closed != opening:
            level = self._levels.pop()
            closed = level.opening
            self._num_open[closed] -= 1
            self._end_pair(level)
            self._write(("" if self._quote else self._comma[1:]) + _CLOSING[closed])
            self._comma = ""
        if self._levels:
            self._levels[-1].next = _Next.COMMA

    def _end_pair(self, level: _Level) -> None:
        """If there is a key without a value, add the missing colon and null."""
        if level.opening == "{" and level.next in (_Next.COLON, _Next.VALUE):
            self._write(": null" if level.next is _Next.COLON else "null")
            level.next = _Next.COMMA

    def _take_comma(self) -> None:
        self._reader.take(1)
        level = self._levels[-1]
        self._end_pair(level)
        if level.next is _Next.COMMA:
            self._comma = ", " if self._quote else ","
            level.next = _Next.KEY if level.opening == "{" else _Next.VALUE

    def _take_colon(self) -> None:
        self._reader.take(1)
        level = self._levels[-1]
        if level.next is _Next.KEY:  # the key is missing
            self._begin()
            self._write('""')
            level.next = _Next.COLON
        if level.next is _Next.COLON:
            self._write(": " if self._quote else ":")
            level.next = _Next.VALUE

    def _begin(self) -> _Level:
        """A key or a value begins: write the comma or the colon before it."""
        level = self._levels[-1]
        if level.next is _Next.COMMA:
            self._write(", ")
            level.next = _Next.KEY if level.opening == "{" else _Next.VALUE
        elif level.next is _Next.COLON:
            self._write(": ")
            level.next = _Next.VALUE
        self._write(self._comma)
        self._comma = ""
        return level

    def _begin_value(self) -> ArgumentSchema:
        level = self._begin()
        level.next = _Next.COMMA
        return level.value_schema

    # -- strings and words ---------------------------------------------------------------------------------------------

    def _string(self, quote: str) -> Steps[None]:
        """Read a string, whose opening quote has been read."""
        level = self._begin()
        is_key = level.next is _Next.KEY
        key = ""

        def write(text: str) -> None:
            nonlocal key
            if is_key and len(key) < _MAX_KEY:
                key += text
            self._write(text)

        if quote == self._quote:
            schema = level.value_schema
            yield from self._raw_string(write, None if is_key or "string" in schema.types else schema.read_word)
        else:
            write('"')
            if (yield from self._escaped_string(quote, write)) or not self._reader.is_cut:
                write('"')
        self._end(level, key)

    def _raw_string(self, write: Callable[[str], None], convert: Callable[[str], str] | None) -> Steps[None]:
        """Read a string without escapes. If there is `convert`, the schema allows no string here. The text is then held, and
        `convert` makes its JSON."""
        value = HeldValue(write, convert or escaped, is_string=convert is None)
        while (yield from self._reader.until(value.write, self._quote)):
            if (yield from self._is_end_of_string()):
                value.end()
                return
            value.write(self._quote)
        value.end(is_cut=self._reader.is_cut)

    def _escaped_string(self, quote: str, write: Callable[[str], None]) -> Steps[bool]:
        """Read up to the closing quote. Returns whether it came."""
        while char := (yield from self._reader.peek()):
            if piece := (yield from self._reader.piece(_PLAIN[quote])):
                write(piece)
                continue
            self._reader.take(1)
            if char == "\\":
                yield from self._escape(write)
            elif char == quote and (yield from self._is_end_of_string()):
                return True
            else:
                write(escaped(char))
        return False

    def _is_end_of_string(self) -> Steps[bool]:
        return (yield from self._reader.follows(self._after_string))

    def _escape(self, write: Callable[[str], None]) -> Steps[None]:
        """Read what follows a backslash in a string."""
        char = yield from self._reader.peek()
        if char in _ESCAPES:
            write(_ESCAPES[self._reader.take(1)])
        elif char in _NUM_HEX:
            digits = ""
            self._reader.take(1)
            while num_left := _NUM_HEX[char] - len(digits):
                if not (piece := (yield from self._reader.piece(_HEX, num_left))):
                    break
                digits += piece
            if not num_left:
                write(f"\\u{digits:0>4}")
            else:
                write(f"\\{char}{digits}" if (yield from self._reader.is_at_cut()) else f"\\\\{char}{digits}")
        else:  # the backslash itself should have been escaped
            write("\\" if (yield from self._reader.is_at_cut()) else "\\\\")

    def _word(self) -> Steps[None]:
        """Read a number, a key or a value without quotes."""
        level = self._begin()
        is_key = level.next is _Next.KEY
        key = ""

        def convert(text: str) -> str:
            nonlocal key
            word = text.strip()
            key = json.dumps(word, ensure_ascii=False)
            blanks = "" if self._quote else "".join(char for char in text[len(text.rstrip()) :] if char in _BLANKS)
            return (key if is_key else level.value_schema.read_word(word)) + blanks

        text = yield from self._reader.piece(self._run)
        if text and len(text) < MAX_HELD and (yield from self._reader.peek()) in _AFTER_WORD:  # the whole word is there
            self._write(convert(text))
            self._end(level, key)
            return
        value = HeldValue(self._write, convert)
        value.write(text)
        while not (yield from self._reader.comes(*self._ends)):
            char = yield from self._reader.peek()
            if not char or char in '{}[],"' or (char == ":" and is_key):
                break
            value.write((yield from self._reader.piece(self._run)) or self._reader.take(1))
        value.end(is_cut=(yield from self._reader.is_at_cut()))
        self._end(level, key)

    def _end(self, level: _Level, key: str) -> None:
        """A key or a value has ended. `key`: the key as a JSON string, with its quotes."""
        if level.next is _Next.VALUE:
            level.next = _Next.COMMA
            return
        level.next = _Next.COLON
        if self._quote:
            with suppress(ValueError):  # the key was cut
                level.value_schema = level.schema.argument(str(json.loads(key)))


def repaired(text: str) -> str:
    """Returns the valid JSON object for `text`, which begins with a brace."""
    reader = TextReader()
    reader.push(text)
    reader.finish()
    pieces: list[str] = []
    for _ in ArgumentsReader(reader, pieces.append).read():
        raise AssertionError("the whole text is there")
    return "".join(pieces)
