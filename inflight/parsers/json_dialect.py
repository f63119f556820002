"""`DialectReader`: reads JSON as models write it, in pieces, and writes strict JSON.

Valid JSON is written unchanged. Beside it, this reader takes what has exactly one meaning:

- strings in single quotes, keys without quotes, the words of Python (`True`, `False`, `None`), lists and tuples in parentheses;
- comments (`/* */`, and `//` and `#` up to the end of a line), and white space that JSON does not know;
- line breaks and other control characters in strings, and backslashes that begin no escape;
- a comma behind the last item, and `;` in place of a comma.

At anything else the reader stops with `Status.ERROR`, at the first token that cannot follow. It never guesses:
`repair.find_reading` decides what to do then. Text before that token has been written, so the text that was written and the
rest of the model's text make no valid JSON together.
"""

import re
from collections.abc import Callable

from inflight.parsers.json_states import Level, Next, State, Status, ValueSchema
from inflight.parsers.json_words import KNOWN_WORDS, escaped, find_comment, key_word, translated_escape, value_word

_PLAIN = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f]+") for quote in "\"'"}
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}|U[0-9a-fA-F]{0,8}|x[0-9a-fA-F]{0,2}|.)?", re.DOTALL)
_BLANKS = re.compile(r"\s+")
_WORD = re.compile(r"(?:[^\s{}\[\](),:;\"'#/]|/(?![/*]))+")
_MORE_WORDS = re.compile(r"(?:[ \t]+(?:[^\s{}\[\](),:;\"'#/]|/(?![/*]))+)*+[ \t]*")
# a word of a family with its own quote in which a comma is missing: a number or a constant, and the next key
_TWO_WORDS = re.compile(r"(?:-?[0-9.]+(?:[eE][+-]?[0-9]+)?|true|false|null)[A-Za-z_]\w*:")
_LONGEST_WORD = 4096
_LONGEST_GAP = 1000  # characters of white space in one place that are kept
_OPENING = {"{": "{", "[": "[", "(": "["}
_CLOSING = {"}": "{", "]": "[", ")": "("}
_JSON_CLOSING = {"{": "}", "[": "]", "(": "]"}


class DialectReader:
    """
    Args:
        write: gets each piece of JSON with the position of its end in the model's text, and whether it is the same text there.
            None: nothing is written.
        stops: texts that end the value. In a string they do not count.
        quote: the family's own quote, around strings without escapes; "" if there is none. With such a quote white space
            outside strings has no meaning, and every word without quotes is a value, with spaces or not.
        schema: the schema of the value. It decides the types of values, but only if there is a `quote`.
        may_miss_commas: whether white space, a comment or a bracket may stand in place of a comma, and a comma may be too many.

    Attributes:
        position: how many characters have been read. After an error it is the beginning of the token that cannot follow.
        in_string: the quote of the string in which the text so far ends; "" if it ends in no string.
        string_start: where the last string began.
        state: where the reader is, if it is not in a string.
    """

    def __init__(
        self,
        write: Callable[[int, str, bool], None] | None = None,
        *,
        stops: tuple[str, ...] = (),
        quote: str = "",
        schema: ValueSchema | None = None,
        may_miss_commas: bool = False,
    ) -> None:
        self.status = Status.OPEN
        self.position = 0
        self.in_string = ""
        self.string_start = 0
        self.level: Level | None = None
        self.next = Next.VALUE
        self.has_gap = False
        self.num_commas = 0
        self.num_guesses = 0
        self._is_behind_doubt = False  # the last value is a list in which a comma may be missing
        self._has_comma = False  # a comma was read that has not been written yet
        self._gap = ""
        self._write_piece = write
        self._stops = stops
        self._quote = quote
        self._root = schema
        self._may_miss_commas = may_miss_commas
        self._text = ""
        self._start = 0  # the position of `_text`
        self._is_final = False
        self._key: list[str] | None = None  # the pieces of the key that is read, if it is needed
        self._typed: list[str] | None = None  # the pieces of a string that will be no string in JSON
        self._own_plain = re.compile(rf'[^"\\\x00-\x1f{re.escape(quote[0])}]+') if quote else None
        self._ends = (*stops, quote) if quote else stops
        self._first = {each[0] for each in self._ends}

    @property
    def state(self) -> State:
        return State(self.level, self.next, self.has_gap, self.num_commas, self.num_guesses)

    def restart(self, state: State, text: str, position: int) -> None:
        """Read `text`, the whole of it, from `position` on, where a reader was in this state. Only for a reader that
        writes nothing."""
        self.status = Status.OPEN
        self.level, self.next, self.has_gap, self.num_commas, self.num_guesses = state
        self.in_string = ""
        self.position = position
        self._text, self._start, self._is_final = text, 0, True

    def feed(self, text: str, *, is_final: bool = False) -> None:
        """Read more text. `is_final`: no more will come."""
        self._text = self._text[self.position - self._start :] + text
        self._start = self.position
        self._is_final = is_final
        while self.step():
            pass

    @property
    def unwritten(self) -> str:
        """A comma and white space that were read but not written, because nothing has followed yet."""
        return ("," if self._has_comma else "") + ("" if self._quote else self._gap)

    @property
    def rest(self) -> str:
        """The text that was fed and not read."""
        return self._text[self.position - self._start :]

    def step(self) -> bool:
        """Read a token, or a part of a string. Returns whether there may be more to read in the text so far."""
        at = self.position - self._start
        if self.status is not Status.OPEN:
            return False
        if at == len(self._text):
            is_whole = self.level is None and self.next is Next.COMMA
            return self._end(Status.CLOSED if is_whole else Status.STOPPED) if self._is_final else False
        if self.in_string:
            return self._own_string(at) if self.in_string == self._quote else self._string(at)
        return self._token(at)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _token(self, at: int) -> bool:
        text = self._text
        char = text[at]
        if char in self._first and (known := self._special(at)) is not None:
            return known
        if char.isspace():
            found = _BLANKS.match(text, at)
            assert found is not None
            self.position += found.end() - at
            self._add_gap(found.group())
            return True
        if self.level is None and self.next is Next.COMMA:
            return self._end(Status.CLOSED)
        if char in "{[" or (char == "(" and not self._quote):
            return self._open(char)
        if char in "}]" or (char == ")" and not self._quote):
            return self._close(char)
        if char == "," or (char == ";" and not self._quote):
            return self._comma()
        if char == ":":
            return self._colon()
        if char in "\"'":
            return self._open_string(char)
        if not self._quote and (char == "#" or text.startswith(("//", "/*"), at)):
            return self._comment(at)
        if not self._quote and char == "/" and at + 1 == len(text) and not self._is_final:
            return False
        return self._word(at)

    def _special(self, at: int) -> bool | None:
        """Read a text that ends the value, or the family's own quote, if one comes next; otherwise return None."""
        for literal in self._ends:
            if self._text.startswith(literal, at):
                return self._open_string(literal) if literal == self._quote else self._end(Status.STOPPED)
        return False if self._may_begin_end(at) else None

    def _may_begin_end(self, at: int) -> bool:
        """Whether the text so far ends with the beginning of a text that ends the value or a word."""
        left = self._text[at : at + 64]
        return not self._is_final and any(len(left) < len(each) and each.startswith(left) for each in self._ends)

    def _comment(self, at: int) -> bool:
        text = self._text
        found = find_comment(text, at, is_final=self._is_final)
        if found is None:
            return self._wait(at, _LONGEST_WORD)
        self.position += found.end() - at
        self._add_gap("" if self._gap else " ")
        return True

    def _word(self, at: int) -> bool:
        """Read a key or a value without quotes."""
        is_key = self._next_after_gap() in (Next.FIRST_KEY, Next.KEY)
        end = self._end_of_own_word(at, is_key=is_key) if self._quote else self._end_of_word(at, is_key=is_key)
        if end == len(self._text) and not self._is_final:
            return self._wait(at, _LONGEST_WORD)
        word = self._text[at:end].rstrip(" \t")
        if self._quote:
            written = f'"{escaped(word.strip())}"' if is_key else self._own_value(word)
        else:
            written = key_word(word) if is_key else value_word(word, is_in_list=self._is_in_list())
        if not self._quote and not is_key and written and written[0] == '"' and self._text[end : end + 1] in ("#", "/"):
            written = None  # "C#" and "a//b" are no values with a comment
        if not word or written is None or not self._begin(is_key=is_key):
            return self._end(Status.ERROR)
        if self.level is not None and len(written) > 1 and written[-2:].isdigit() and self._is_in_list():
            self.level = self.level._replace(has_long_number=True)
        self.position += len(word)
        self.num_guesses += written[0] == '"' and (not self._quote or ":" in word)
        self._write(written, is_same=written == word)
        if is_key:
            self._end_key(word.strip())
        else:
            self.next = Next.COMMA
        return True

    def _end_of_word(self, at: int, *, is_key: bool) -> int:
        found = _WORD.match(self._text, at)
        if found is None:
            return at
        word = found.group()
        if is_key or self._is_in_list() or word in KNOWN_WORDS or not word[0].isalpha():
            return found.end()
        more = _MORE_WORDS.match(self._text, found.end())  # a text without quotes may have several words
        assert more is not None
        return more.end()

    def _end_of_own_word(self, at: int, *, is_key: bool) -> int:
        """Where a word ends if the family has its own quote: at a bracket, a comma, a quote, or (a key) a colon."""
        text = self._text
        for end in range(at, len(text)):
            char = text[end]
            if char in '{}[],"' or (is_key and char == ":"):
                return end
            if char in self._first:
                if any(text.startswith(each, end) for each in self._ends):
                    return end
                if self._may_begin_end(end):
                    return len(text)
        return len(text)

    def _own_value(self, word: str) -> str | None:
        """The JSON of a value in a text with the family's own quote; None if a comma before the next key is missing in it."""
        level, schema = self.level, self._value_schema()
        has_key = level is not None and level.schema is not None and level.schema.has_key_in(word)
        is_broken = has_key or word.endswith(":") or _TWO_WORDS.match(word)
        return None if is_broken or schema is None else schema.read_word(word.strip())

    def _wait(self, at: int, most: int) -> bool:
        """More text must come before the token can be read. A token that is too long, or that has no end, is an error."""
        if self._is_final or len(self._text) - at > most:
            return self._end(Status.ERROR)
        return False

    def _end(self, status: Status) -> bool:
        self.status = status
        return False

    # -- structure -----------------------------------------------------------------------------------------------------

    def _is_in_list(self) -> bool:
        return self.level is not None and self.level.opening != "{"

    def _next_after_gap(self) -> Next:
        """What comes next if the comma is missing."""
        if self.next is not Next.COMMA or self.level is None or not (self.has_gap and self._may_miss_commas):
            return self.next
        return Next.ITEM if self._is_in_list() else Next.KEY

    def _begin(self, *, is_key: bool) -> bool:
        """A key or a value begins here. Returns whether it may. Writes the comma before it."""
        allowed = (Next.FIRST_KEY, Next.KEY) if is_key else (Next.VALUE, Next.FIRST_ITEM, Next.ITEM)
        after = self._next_after_gap()
        if after not in allowed:
            return False
        if self.next is Next.COMMA:
            self._count_comma()
            self.num_commas += 1
        self.next = after
        self._write_gap()
        self.has_gap = self._is_behind_doubt = False
        return True

    def _count_comma(self) -> None:
        assert self.level is not None
        self._has_comma = True
        self.level = self.level._replace(num_commas=self.level.num_commas + 1)

    def _open(self, char: str) -> bool:
        self.has_gap = True  # next to a bracket, white space is not needed in place of a comma
        schema = self._value_schema()
        if not self._begin(is_key=False):
            return self._end(Status.ERROR)
        inner = schema.item() if schema is not None and char != "{" else None
        self.level = Level(char, schema, self.level, value_schema=inner)
        self.next = Next.FIRST_KEY if char == "{" else Next.FIRST_ITEM
        self.position += 1
        self._write(_OPENING[char], is_same=char != "(")
        return True

    def _close(self, char: str) -> bool:
        level = self.level
        if level is None or level.opening != _CLOSING[char] or self.next in (Next.COLON, Next.VALUE):
            return self._end(Status.ERROR)
        if char == ")" and not level.num_commas and self.next is Next.COMMA:
            return self._end(Status.ERROR)  # in Python this is no tuple
        if self.next in (Next.KEY, Next.ITEM) and (
            level.may_miss_comma if self._is_in_list() else self._is_behind_doubt
        ):
            return self._end(Status.ERROR)
        self._has_comma = False
        self._write_gap()
        self.position += 1
        self._write(_JSON_CLOSING[level.opening], is_same=char != ")")
        self._is_behind_doubt = level.may_miss_comma
        self.level = level.outer
        self.next, self.has_gap = Next.COMMA, True
        if self.level is None:
            self._end(Status.CLOSED)
        return True

    def _comma(self) -> bool:
        if self.level is None or self.next in (Next.COLON, Next.VALUE):
            return self._end(Status.ERROR)
        if self.next is Next.COMMA:
            self._write_gap()
            self._count_comma()
            self.next = Next.ITEM if self._is_in_list() else Next.KEY
        elif not (self._may_miss_commas and self.next in (Next.KEY, Next.ITEM)):
            return self._end(Status.ERROR)
        else:
            self.num_guesses += 1
        self.position += 1
        return True

    def _colon(self) -> bool:
        if self.next is not Next.COLON:
            return self._end(Status.ERROR)
        self._write_gap()
        self.position += 1
        self._write(": " if self._quote else ":", is_same=not self._quote)
        self.next = Next.VALUE
        return True

    def _value_schema(self) -> ValueSchema | None:
        return self._root if self.level is None else self.level.value_schema

    def _end_key(self, key: str) -> None:
        self.next = Next.COLON
        self.has_gap = False
        if self._quote and self.level is not None and self.level.schema is not None:
            self.level = self.level._replace(value_schema=self.level.schema.argument(key))

    # -- strings -------------------------------------------------------------------------------------------------------

    def _open_string(self, quote: str) -> bool:
        after = self._next_after_gap()
        is_key = after in (Next.FIRST_KEY, Next.KEY)
        schema = self._value_schema()
        if not self._begin(is_key=is_key):
            return self._end(Status.ERROR)
        self.string_start = self.position
        self.position += len(quote)
        self.in_string = quote
        self._key = [] if is_key and self._quote else None
        is_typed = quote == self._quote and not is_key and schema is not None and "string" not in schema.types
        self._typed = [] if is_typed else None
        if not is_typed:
            self._write('"', is_same=quote == '"')
        return True

    def _string(self, at: int) -> bool:
        """Read a part of a string with escapes."""
        text, quote = self._text, self.in_string
        if found := _PLAIN[quote].match(text, at):
            self.position += found.end() - at
            self._write_string(found.group(), found.group())
            return True
        char = text[at]
        if char == quote:
            self.position += 1
            self._close_string('"', is_same=quote == '"')
        elif char == "\\":
            found = _ESCAPE.match(text, at)
            assert found is not None
            escape = found.group()
            size = {"u": 6, "x": 4, "U": 10}.get(escape[1:2], 2)
            if found.end() == len(text) and len(escape) < size:
                return self._end(Status.STOPPED) if self._is_final else False
            written = translated_escape(escape)
            self.position += 2 if written is None else len(escape)
            self._write_string(escape, written or f"\\\\{escaped(escape[1:2])}")
        else:
            self.position += 1
            self.num_guesses += 1
            self._write_string(char, escaped(char))
        return True

    def _own_string(self, at: int) -> bool:
        """Read a part of a string between the family's own quotes, which has no escapes."""
        text = self._text
        assert self._own_plain is not None
        if found := self._own_plain.match(text, at):
            self.position += found.end() - at
            self._write_string(found.group(), escaped(found.group()))
        elif text.startswith(self._quote, at):
            self.position += len(self._quote)
            self._close_string('"', is_same=False)
        elif not self._is_final and self._quote.startswith(text[at:]):
            return False
        else:
            self.position += 1
            self._write_string(text[at], escaped(text[at]))
        return True

    def _write_string(self, read: str, written: str) -> None:
        if self._key is not None:
            self._key.append(read)
        if self._typed is not None:
            self._typed.append(read)
        else:
            self._write(written, is_same=read == written)

    def _close_string(self, written: str, *, is_same: bool) -> None:
        self.in_string = ""
        schema = self._value_schema()
        if self._typed is not None and schema is not None:
            self._write(schema.read_word("".join(self._typed)), is_same=False)
            self._typed = None
        else:
            self._write(written, is_same=is_same)
        if self.next in (Next.FIRST_KEY, Next.KEY):
            self._end_key("".join(self._key or ()))
        else:
            self.next = Next.COMMA

    # -- writing -------------------------------------------------------------------------------------------------------

    def _add_gap(self, blanks: str) -> None:
        self.has_gap = True
        if self.next in (Next.KEY, Next.ITEM) and self.level is not None and not self.level.is_spaced:
            self.level = self.level._replace(is_spaced=True)
        known = "".join(char for char in blanks if char in " \t\r\n")
        self._gap = (self._gap + known)[:_LONGEST_GAP]

    def _write_gap(self) -> None:
        comma = "," if self._has_comma else ""
        self._has_comma = False
        gap = (" " if comma else "") if self._quote else self._gap
        self._gap = ""
        self._write(comma + gap, is_same=False)

    def _write(self, written: str, *, is_same: bool) -> None:
        if self._write_piece is not None and written:
            self._write_piece(self.position, written, is_same)
