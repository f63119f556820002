"""`PythonArguments`: reads the arguments of a call that is written as in Python, and writes an object of JSON.

    city="Oslo", days=3, units=['km', None], options={"wind": True})   ->   {"city": "Oslo", "days": 3, ...}

The text is read while it arrives; only numbers and words wait until they end. Some text that is not Python is read, too,
because only one reading of it is possible: a line break in a string, an apostrophe between two letters of a string, a comma
that is missing before `name=` or is written twice, and a missing parenthesis at the end.

Everything else is doubtful: `a="x, b="y"` has more than one reading. Then nothing is guessed. The rest of the call is passed on
as the model wrote it, so that the arguments are not valid JSON. The client sees this, and can answer the model so.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NoReturn

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.json_words import escaped
from inflight.parsers.text_reader import BLANKS, Following, Steps, TextReader

_WORD = re.compile(r"[^\s()\[\]{},=:'\"]+")
_MAX_WORD = 1000  # characters of a number, a name or another word
_MAX_NAMES = 1000  # how many names of arguments are remembered, to find a name that comes twice
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_HEX = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]+")
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_SIMPLE_ESCAPES = {**{char: f"\\{char}" for char in '"\\bfnrt'}, "'": "'", "a": "\\u0007", "v": "\\u000b", "\n": ""}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(
    r"[+-]?(0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|0+|[1-9][0-9_]*|[0-9_]*\.[0-9_]*([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
)
_IN_LINE = re.compile(r"[^\n]+")
_BARE_WORD = re.compile(r"[^\W\d]\w*")
_AFTER_VALUE = (",", ")", "]", "}", ":")


class _Next(Enum):
    ITEM = auto()  # an argument, a key or a value; or the end of the brackets
    COLON = auto()
    VALUE = auto()  # the value of a key, or of a named argument
    COMMA = auto()  # a comma; or the end of the brackets


@dataclass(slots=True)
class _Level:
    """Brackets whose end has not come yet. The outermost are those of the call."""

    opening: str
    next: _Next = _Next.ITEM
    num_items: int = 0
    has_comma: bool = False


@dataclass(slots=True)
class _Call:
    """What is known of the call: the names of its arguments so far."""

    seen: set[str] = field(default_factory=set)
    has_names: bool = False  # a named argument has come; only named ones may follow
    is_spread: bool = False  # a single dict stands in place of the arguments
    schema: ArgumentSchema = field(default_factory=ArgumentSchema)  # of the current argument


class PythonArguments:
    """
    Args:
        write: writes more of the call's arguments.
        schema: the schema of all arguments. Its order says which argument a value without a name is.
        stops: texts that end the arguments, even if brackets are open. In a string they do not count.
        after_list: texts that may come after a list of calls.
    """

    def __init__(
        self,
        reader: TextReader,
        write: Callable[[str], None],
        schema: ArgumentSchema,
        *,
        stops: tuple[str, ...],
        after_list: tuple[str, ...],
    ) -> None:
        self._reader = reader
        self._write = write
        self._schema = schema
        self._names = schema.ordered_names()
        self._stops = stops
        self._after_string: Following = {
            **dict.fromkeys((*_AFTER_VALUE, *stops)),
            **{name: {"=": None} for name in sorted(self._names, key=len, reverse=True)},
        }
        self._after_list = dict.fromkeys(after_list)
        self._end_of_text = ""  # the last character of the last value, blanks aside, if it was a string
        self._has_comment = False
        self._has_added_comma = False  # the comma before the current argument was missing
        self._call = _Call()
        self._levels = [_Level("(")]

    def read(self) -> Steps[bool]:
        """Read up to the closing parenthesis, and consume it. Returns whether the arguments were read. If not, the arguments up
        to a doubtful place have been written, and the rest of the call comes next in the text."""
        try:
            while self._levels:
                yield from self._skip_blanks()
                char = yield from self._reader.peek()
                if not char or (self._stops and (yield from self._reader.comes(*self._stops))):
                    return (yield from self._end_early())
                is_outside = len(self._levels) == 1 and char == "]"
                if is_outside and (yield from self._reader.follows({"]": self._after_list})):
                    return (yield from self._end_early())  # the list of calls ends: the parenthesis is missing
                yield from self._step(char)
        except MalformedCallError:
            return False
        return True

    def _end_early(self) -> Steps[bool]:
        """The call has ended without its parenthesis, or a limit has cut it."""
        level = self._levels[-1]
        if (yield from self._reader.is_at_cut()):
            return True
        may_be_in_text = self._has_comment or self._end_of_text in _CLOSING.values()  # the parenthesis
        if len(self._levels) > 1 or level.next is _Next.VALUE or may_be_in_text:
            return False
        self._close(level)
        return True

    def _skip_blanks(self) -> Steps[None]:
        while (yield from self._reader.piece(BLANKS)) or (yield from self._skip_comment()):
            pass

    def _skip_comment(self) -> Steps[bool]:
        """Skip a comment up to the end of its line. Returns whether there was one."""
        if self._levels[-1].next is _Next.VALUE or not (yield from self._reader.literal("#")):
            return False
        self._has_comment = True
        while (yield from self._reader.piece(_IN_LINE)):
            pass
        if not (yield from self._reader.literal("\n")) and not self._reader.is_cut:
            self._refuse("#")
        return True

    def _step(self, char: str) -> Steps[None]:
        level = self._levels[-1]
        if level.next is _Next.COLON:
            self._take_if(char, ":")
            self._write(": ")
            level.next = _Next.VALUE
        elif char == "," and level.next is not _Next.VALUE and level.num_items:
            self._reader.take(1)
            level.next = _Next.ITEM
            level.has_comma = True
        elif char == _CLOSING[level.opening] and level.next is not _Next.VALUE:
            self._reader.take(1)
            self._close(level)
        elif level.next is _Next.VALUE:
            level.next = _Next.COMMA
            yield from self._value(char)
        elif level.next is _Next.COMMA and (len(self._levels) > 1 or char in "\"'([{"):
            raise MalformedCallError
        elif len(self._levels) == 1:
            yield from self._argument(level, char)
        else:
            yield from self._item(level, char)

    def _take_if(self, char: str, wanted: str) -> None:
        if char != wanted:
            raise MalformedCallError
        self._reader.take(1)

    # -- brackets ------------------------------------------------------------------------------------------------------

    def _open(self, bracket: str) -> None:
        self._levels.append(_Level(bracket))
        self._write("{" if bracket == "{" else "[")

    def _close(self, level: _Level) -> None:
        self._levels.pop()
        if self._levels:
            if level.opening == "(" and level.num_items == 1 and not level.has_comma:
                raise MalformedCallError  # (1) is 1, but (1,) is a list
            self._write("}" if level.opening == "{" else "]")
        elif not self._call.is_spread:
            self._write("}" if level.num_items else "{}")

    def _item(self, level: _Level, char: str) -> Steps[None]:
        """Read an item of a list, or a key of a dict."""
        if level.num_items:
            self._write(", ")
        level.num_items += 1
        if level.opening != "{":
            level.next = _Next.COMMA
            yield from self._value(char)
            return
        level.next = _Next.COLON
        if char in _PLAIN:
            yield from self._value(char)
        else:
            word = yield from self._word()
            is_name = _BARE_WORD.fullmatch(word) and word not in _CONSTANTS
            self._write(json.dumps(word if is_name else self._constant(word, ArgumentSchema()), ensure_ascii=False))

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _argument(self, level: _Level, char: str) -> Steps[None]:
        """Read the name of an argument, or an argument without a name."""
        is_first = not level.num_items
        word = ""
        is_spread = False
        if char not in "\"'([{":
            is_spread = bool((yield from self._reader.literal("**")))
            word = "" if is_spread else (yield from self._word())
            yield from self._skip_blanks()
            if word and (yield from self._is_name()):
                self._begin_argument(level, word)
                self._call.has_names = True
                level.next = _Next.VALUE
                return
            if word and (yield from self._reader.is_at_cut()):
                return  # it may be the beginning of a name
        if level.next is _Next.COMMA:  # a comma is missing, and no name follows
            self._refuse(word)
        if is_first and (yield from self._reader.peek()) == "{" and (is_spread or not self._takes_object(0)):
            self._reader.take(1)
            self._call.is_spread = True
            level.num_items = 1
            level.next = _Next.COMMA
            self._open("{")
            return
        position = level.num_items
        if is_spread or self._call.has_names or position >= len(self._names):
            self._refuse("**" if is_spread else word)
        self._begin_argument(level, self._names[position])
        level.next = _Next.COMMA
        if word:
            self._write(self._constant(word, self._call.schema))
        else:
            yield from self._value(char)

    def _is_name(self) -> Steps[bool]:
        """Whether a "=" comes, so that the word before it is a name; consume it. ":" is read as "="."""
        if (yield from self._reader.comes("==")):
            return False
        return bool((yield from self._reader.literal("=", ":")))

    def _begin_argument(self, level: _Level, name: str) -> None:
        self._has_added_comma = level.next is _Next.COMMA
        if self._call.is_spread or name in self._call.seen or (self._has_added_comma and self._end_of_text == ","):
            self._refuse(f"{name}=")
        if len(self._call.seen) < _MAX_NAMES:
            self._call.seen.add(name)
        self._call.schema = self._schema.argument(name)
        self._write(f"{', ' if level.num_items else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        level.num_items += 1

    def _takes_object(self, position: int) -> bool:
        """Whether the argument at this position may be a dict."""
        return position < len(self._names) and "object" in self._schema.argument(self._names[position]).types

    # -- values --------------------------------------------------------------------------------------------------------

    def _value(self, char: str) -> Steps[None]:
        self._end_of_text = ""
        if char in _CLOSING:
            self._open(self._reader.take(1))
        elif char in _PLAIN:
            yield from self._string(self._reader.take(1))
        else:
            word = yield from self._word()
            if word in ("r", "R", "u", "U") and (yield from self._reader.peek()) in _PLAIN:
                yield from self._string(self._reader.take(1), is_raw=word in "rR")
            elif word and (yield from self._reader.is_at_cut()):
                self._write(word)
            else:
                schema = self._call.schema if len(self._levels) == 1 else ArgumentSchema()
                self._write(self._constant(word, schema))

    def _word(self) -> Steps[str]:
        """Read a number, a name or another word. After it no quote and no opening bracket may come, but for a prefix of a
        string."""
        pieces: list[str] = []
        room = _MAX_WORD
        while room and (piece := (yield from self._reader.piece(_WORD, room))):
            pieces.append(piece)
            room -= len(piece)
        word = "".join(pieces)
        char = yield from self._reader.peek()
        is_prefix = word in ("r", "R", "u", "U") and char in _PLAIN
        if not room or not word or (char and char in "\"'([{" and not is_prefix):
            self._refuse(word)
        return word

    def _constant(self, word: str, schema: ArgumentSchema) -> str:
        """The JSON of a number or a word. A word without quotes is a string if it can be nothing else."""
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if _JSON_NUMBER.fullmatch(word):
            return word
        if _PYTHON_NUMBER.fullmatch(word):
            try:
                return json.dumps(int(word, 0) if re.fullmatch(r"[+-]?\w+", word) else float(word), allow_nan=False)
            except ValueError:
                self._refuse(word)
        is_text = isinstance(schema.node, Mapping) and "string" in schema.types and schema.types <= {"string", "null"}
        if not is_text or not _BARE_WORD.fullmatch(word):
            self._refuse(word)
        return json.dumps(word, ensure_ascii=False)

    def _refuse(self, text: str) -> NoReturn:
        """The text is doubtful: pass it on as it is."""
        self._write(text)
        raise MalformedCallError

    # -- strings -------------------------------------------------------------------------------------------------------

    def _string(self, quote: str, *, is_raw: bool = False) -> Steps[None]:
        """Read a string, whose first quote has been read."""
        self._write('"')
        if (yield from self._reader.literal(quote * 2)):
            quote *= 3
        if self._has_added_comma and (yield from self._reader.peek()) == ",":
            raise MalformedCallError  # the comma may have come too late
        before, last = "", ""  # the last character, and the last one that is not blank
        while char := (yield from self._reader.peek()):
            if piece := (yield from self._reader.piece(_PLAIN[quote[0]])):
                self._write(escaped(piece))
                before = piece[-1]
                last = piece.rstrip()[-1:] or last
                continue
            if (yield from self._reader.literal(quote)):
                if len(quote) == 3 or (yield from self._is_end()):
                    self._write('"')
                    self._end_of_text = last
                    return
                yield from self._apostrophe(quote, before)
            else:
                self._reader.take(1)
                if char == "\\":
                    yield from self._escape(is_raw=is_raw)
                else:
                    self._write(escaped(char))
            before = char
            last = char if not char.isspace() else last
        if not self._reader.is_cut:
            raise MalformedCallError

    def _is_end(self) -> Steps[bool]:
        """Whether a string may end before what comes next."""
        return (yield from self._reader.follows(self._after_string))

    def _apostrophe(self, quote: str, before: str) -> Steps[None]:
        """A quote inside a string: it belongs to the string if it stands between two letters. Otherwise it is not known where
        the string ends."""
        after = yield from self._reader.peek()
        if not (before.isalnum() and after.isalnum()):
            self._refuse(quote)
        self._write(escaped(quote))

    def _escape(self, *, is_raw: bool) -> Steps[None]:
        """Read what follows a backslash in a string."""
        char = yield from self._reader.peek()
        if not char:
            if not self._reader.is_cut:
                self._refuse("\\")
        elif is_raw:
            self._write("\\\\" + escaped(self._reader.take(1)))
        elif char in _SIMPLE_ESCAPES:
            self._write(_SIMPLE_ESCAPES[self._reader.take(1)])
        elif char in _NUM_HEX:
            self._reader.take(1)
            yield from self._code(char, _HEX, 16, _NUM_HEX[char], is_exact=True)
        elif char in "01234567":
            yield from self._code("", _OCTAL, 8, 3)
        elif char == "N":
            self._refuse("\\")
        else:  # Python keeps the backslash
            self._write("\\\\")

    def _code(
        self, letter: str, digit: re.Pattern[str], base: int, most: int, *, is_exact: bool = False
    ) -> Steps[None]:
        """Read the digits of an escape."""
        digits = ""
        while len(digits) < most and (piece := (yield from self._reader.piece(digit, most - len(digits)))):
            digits += piece
        if (yield from self._reader.is_at_cut()):
            return
        code = int(digits or "0", base)
        if (is_exact and len(digits) < most) or code > 0x10FFFF:
            self._refuse(f"\\{letter}{digits}")
        self._write(f"\\u{code:04x}" if code < 0x10000 else escaped(chr(code)))
