"""`find_reading`: what a model meant by JSON that is damaged, if only one reading is possible.

A reading is the text after one edit, if `DialectReader` reads this text to its end. Edits are tried in this order, and only
the first kind that gives any reading counts:

1. A comma, colon, quote or bracket is added, taken away or moved.
2. The brackets that are missing at the end of the text are added.
3. Quotes inside a string are escaped, if words stand on both of their sides.

If the readings of a kind are different values, it is not certain what the model meant, and `find_reading` returns none of
them. So nothing is invented. An edit is made at the first wrong token or before it, because an edit behind it would not help.
The work is bounded: for a text that needs more, `find_reading` returns nothing.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from inflight.parsers.json_dialect import DialectReader
from inflight.parsers.json_states import Next, State, Status, ValueSchema
from inflight.parsers.odd_values import has_odd_key, has_odd_quote, has_odd_string, is_torn, lacks_bracket
from inflight.parsers.repair_budget import RepairBudget, TooMuchWorkError

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
# a quote that is missing in a string stands behind a word and before a sign, or behind a sign and before a word
_AT_STRUCTURE = re.compile(r"(?<=\S)(?=\s*[,:}\])\n])|(?<=[\[{(,:\n])(?=\S)|(?<=[\[{(,:\n] )(?=\S)")
_STRUCTURE = "{}[](),:;\"'|<>"
_BLANKS = re.compile(r"\s+")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_LONG_NUMBER = re.compile(r"[\[,]-?[0-9.]*[0-9]{2,}[,\]]")  # in a list without white space
_DAMAGED_WORD = re.compile(r"([\w.+-]+)[,:{}\[\]]?[\w.+-]*")
_PREFIX = re.compile(r"\b[bBfFrRuU]+['\"]")  # of a string of Python
_TYPOGRAPHIC_SIGNS = re.compile("[“”„，：；]")  # perhaps written instead of a sign of JSON
_COMPACT = re.compile(r'"\s*:[^\s]')  # no white space stands before values
_RUN = re.compile(r"([,:\"'{}\[\]])\1{2,}")  # a sign that is written more than twice
_STEPS_OF_OWN_TOKEN = 8  # with a quote of the family, because schemas decide the types of words
_NEAR = 200  # characters
_MOST_INNER_QUOTES = 200
# Text behind the value -> how many edits it needs itself: 0, 1 or more; -1 if it needs none, but an edit of the value would be
# doubtful before it.
Tail = Callable[[str], int]


class Reading(NamedTuple):
    """`value`: JSON. `end`: where the value ends in the damaged text."""

    value: str
    end: int


def find_reading(
    text: str,
    tail: Tail,
    budget: RepairBudget,
    *,
    written: str = "",
    quote: str = "",
    schema: ValueSchema | None = None,
) -> Reading | None:
    """Returns the only reading of the value with which `text` begins; None if there is none or more than one, or if the work
    is too much.

    Args:
        tail: says whether the text behind the value may follow it.
        budget: of the answer. What the search takes is taken from it.
        written: JSON that has been passed on already. The reading must begin with it.
        quote, schema: as in `DialectReader`.
    """
    return _Search(text, tail, budget, written, quote, schema).find()


def only_value(text: str, budget: RepairBudget) -> str | None:
    """The JSON that a text means which is one value and begins with a bracket; None if this is not certain."""
    found = translated(text)
    if found is not None and not text[found[1] :].strip():
        return found[0]
    reading = find_reading(text, lambda behind: min(len(behind.strip()), 2), budget)
    return None if reading is None else reading.value


class _Search:
    def __init__(
        self, text: str, tail: Tail, budget: RepairBudget, written: str, quote: str, schema: ValueSchema | None
    ) -> None:
        self._text = text
        self._tail_of = tail
        self._budget = budget
        self._written = written
        self._quote = quote
        self._schema = schema
        self._reader = DialectReader(quote=quote, schema=schema, may_miss_commas=True)
        self._starts: list[int] = []  # where tokens begin, and the states there
        self._states: list[State] = []
        self._strings: list[tuple[int, int]] = []  # where strings begin and end, with their quotes
        self._error = 0  # where the token is that cannot follow
        self._error_end = 0  # the end of a word there
        self._limit = 0  # an edit behind it is of no use
        self._is_compact = _COMPACT.search(text, 0, _NEAR) is not None
        self._found: dict[str, list[Reading]] = {}  # by value, in one form: the readings with the fewest edits
        self._fewest = 99
        self._signs: set[str] = set()  # the signs that these readings add
        self._is_doubtful = False  # whether one of these readings is probably not what the model meant

    def find(self) -> Reading | None:
        if not self._budget.is_left:
            return None
        try:
            self._budget.spend(1, num_chars=4 * len(self._text))  # for finding where the text ends
            self._read_once()
            end = self._reader.position
            if self._reader.status is Status.CLOSED and is_torn(self._text[:end], self._text[end : end + 1]):
                return None
            is_code = self._text.startswith("\\", self._error) or _PREFIX.match(self._text, self._error - 1)
            is_code = is_code or _TYPOGRAPHIC_SIGNS.search(self._text, self._error, self._limit + 1)
            if is_code or (self._found and not self._fewest):
                return None if is_code else self._only()  # this is not meant as JSON, or needs no edit
            for edited in (self._one_edit, self._closers_at_end, self._inner_quotes):
                edited()
                if self._found:
                    return self._only()
        except TooMuchWorkError:
            pass
        return None

    def _only(self) -> Reading | None:
        if len(self._found) != 1 or self._is_doubtful or any(self._is_in_a_string(sign) for sign in self._signs):
            return None
        (readings,) = self._found.values()
        return next((each for each in readings if each.value.startswith(self._written)), None)

    def _is_in_a_string(self, sign: str) -> bool:
        """Whether the missing character stands in a string nearby. Then it may have moved there from its place."""
        if sign not in tuple(",:{}[]"):
            return False
        return any(sign in string for string in self._near_strings())

    def _near_strings(self) -> list[str]:
        text = self._text
        near = [text[begin:end] for begin, end in self._strings if end > self._limit - _NEAR]
        return near + [found.group() for found in _STRING.finditer(text, self._limit, self._limit + _NEAR)]

    # -- reading -------------------------------------------------------------------------------------------------------

    def _tail(self, text: str) -> int:
        self._budget.spend(1, num_chars=len(text))
        return self._tail_of(text)

    def _read_once(self) -> None:
        """Read the damaged text up to its error, and keep where its tokens are."""
        reader = self._reader
        reader.feed("")
        reader.restart(State(None, Next.VALUE, has_gap=False), self._text, 0)
        begin = -1
        while True:
            is_outside = not reader.in_string
            if is_outside:
                self._starts.append(reader.position)
                self._states.append(reader.state)
            position = reader.position
            self._budget.spend(1)
            if not reader.step():
                break
            if is_outside and reader.in_string:
                begin = position
            elif not is_outside and not reader.in_string:
                self._strings.append((begin, reader.position))
        if reader.in_string:
            self._strings.append((begin, reader.position))
        self._limit = self._error = reader.position
        if reader.status is Status.ERROR and (word := _DAMAGED_WORD.match(self._text, self._limit)):
            self._limit = word.end()
            self._error_end = word.end(1)
        if reader.status is Status.CLOSED:
            behind = self._text[reader.position :]
            self._limit += len(behind) - len(behind.lstrip()) + 1
            if (num_edits := self._tail(behind)) <= 1:
                self._keep(self._text, reader.position, 0, max(num_edits, 0), "," if reader.num_commas == 1 else "")

    def _run(self, text: str, first_change: int) -> DialectReader:
        """Read an edited text that is the same up to `first_change`."""
        i = max(bisect_right(self._starts, first_change) - 3, 0)
        self._reader.restart(self._states[i], text, self._starts[i])
        self._budget.spend(num_chars=len(text))
        is_open = True
        while is_open:
            self._budget.spend(_STEPS_OF_OWN_TOKEN if self._quote else 1)
            is_open = self._reader.step()
        return self._reader

    def _try(
        self, text: str, first_change: int, num_edits: int, added: str = "", *, is_doubtful: bool = False
    ) -> DialectReader:
        reader = self._run(text, first_change)
        end = reader.position
        is_end = reader.status is Status.CLOSED and not is_torn(text[:end], text[end : end + 1])
        if is_end and not self._tail(text[end:]):
            num_added = len(text) - len(self._text)
            self._keep(text, end, num_added, num_edits, added, is_doubtful=is_doubtful)
        return reader

    def _keep(
        self, text: str, end: int, num_added: int, num_edits: int, added: str = "", *, is_doubtful: bool = False
    ) -> None:
        is_edited = num_edits > 0
        # two faults of the structure have too many readings, and not all of them are tried
        is_doubtful = is_doubtful or (is_edited and self._reader.num_commas > 0)
        num_edits += self._reader.num_commas + self._reader.num_guesses
        if num_edits > self._fewest:
            return
        self._budget.spend(1, num_chars=32 * len(text))  # the whole text is read again
        found = translated(text[:end], quote=self._quote, schema=self._schema, may_miss_commas=True)
        if found is None:
            return
        try:
            value = json.loads(found[0])
            form = json.dumps(value, sort_keys=True)
        except (ValueError, RecursionError):
            return
        if added == "moved" and has_odd_key(value):
            return
        is_odd = has_odd_key(value) or has_odd_quote(value)
        is_odd = is_odd or (not self._quote and has_odd_string(value, self._text))
        is_doubtful = is_doubtful or (is_edited and is_odd)
        if num_edits < self._fewest:
            self._found.clear()
            self._signs.clear()
            self._is_doubtful = False
            self._fewest = num_edits
        self._signs.add(added)
        self._is_doubtful |= is_doubtful
        self._found.setdefault(form, []).append(Reading(found[0], end - num_added))

    # -- edits ---------------------------------------------------------------------------------------------------------

    def _one_edit(self) -> None:
        for text, first_change, char in self._deletions():
            self._try(text, first_change, 1, is_doubtful=self._may_come_from_a_value(first_change, char))
        for at, char in self._insertions():
            self._try(self._text[:at] + char + self._text[at:], at, 1, char)
        for run in _RUN.finditer(self._text, max(self._error - _NEAR, 0), self._limit + 1):
            self._try(self._text[: run.start() + 1] + self._text[run.end() :], run.start(), 1)
        self._moves()

    def _may_come_from_a_value(self, at: int, char: str) -> bool:
        """Whether a superfluous character may belong into a string or a number nearby, and is not simply written twice."""
        if char not in ",:":
            return any(lacks_bracket(string, char) for string in self._near_strings())
        before = self._text[max(at - 16, 0) : at]
        behind = self._text[at + 1 : at + 16]
        if char == "," and _LONG_NUMBER.search(before + char + behind):
            return True
        is_double = before.rstrip().endswith(char) or behind.lstrip().startswith(char)
        return not is_double and ('"' in before[-4:] or '"' in behind[:4])

    def _moves(self) -> None:
        """A character is taken away at one place and added at another."""
        if self._quote:
            return  # words have no quotes, so a sign that is taken away would join them
        places = self._insertions()
        lacks_value = self._states[-1].next is Next.COLON and self._text[self._error : self._error + 1] in ("}", ",")
        if lacks_value:
            places = [each for each in places if each[1] not in "\"'"]
        for deleted, first_change, char in list(self._deletions(moves=True)):
            reader = self._run(deleted, first_change)
            limit = reader.position
            known = {limit, *(at - (at > first_change) * len(char) for at, added in places if added == char)}
            if lacks_value and char in "\"'":
                continue
            if char in "\"'" and reader.string_start >= first_change - _NEAR:
                known.update(found.start() for found in _AT_STRUCTURE.finditer(deleted, reader.string_start, limit))
            for at in known:
                if at <= limit:
                    self._try(
                        deleted[:at] + char + deleted[at:], min(at, first_change), 1, "moved" if char in "\"'" else ""
                    )
        for at, char in places:
            added = self._text[:at] + char + self._text[at:]
            limit = self._run(added, at).position
            second = added.find(char, at + len(char), limit + len(char))
            while second >= 0 and limit > self._limit:
                if added[second - 1] != "\\":
                    self._try(added[:second] + added[second + len(char) :], at, 1, "moved" if char in "\"'" else "")
                second = added.find(char, second + 1, limit + len(char))

    def _deletions(self, *, moves: bool = False) -> Iterator[tuple[str, int, str]]:
        """Each text from which one character is taken away, where that is, and the character. `moves`: it is added
        elsewhere."""
        text = self._text
        for at in (*self._starts, *range(self._error + 1, self._limit + 1)):
            is_sign = 0 < at < len(text) and text[at] in "{}[](),:;"
            if is_sign and (moves or not self._quote or text[at] in (text[at - 1], text[at + 1 : at + 2])):
                yield text[:at] + text[at + 1 :], at, text[at]
        for begin, end in (*self._strings, (self._error, 0)):
            for quote in filter(None, (self._quote, '"', "'")):
                for at in (begin, end - len(quote)):
                    is_quote = begin <= at < len(text) and text.startswith(quote, at)
                    if is_quote and (moves or _is_at_structure(text, at, len(quote))):
                        yield text[:at] + text[at + len(quote) :], at, quote

    def _insertions(self) -> list[tuple[int, str]]:
        """Each place at which a character may be missing, and the character. The last places come first."""
        text = self._text
        quotes = {text[begin] for begin, _ in self._strings} & set("\"'") or {'"'}
        if self._quote:
            quotes = {self._quote}
        found: list[tuple[int, str]] = []
        for at in self._starts:
            if at and at <= self._limit:
                if at == len(text) or not text[at].isspace():
                    found += [(at, char) for char in ",:{}[]"]
                found += [(place, quote) for place in self._places_of_quotes(at) for quote in quotes]
        for at in {self._error_end, self._limit} - {0, *self._starts}:
            if at <= len(text):
                found += [(at, char) for char in (*",:{}[]", *quotes)]
        for begin, end in self._strings:
            inside = text[begin:end]
            places = {begin + match.start() for match in _AT_STRUCTURE.finditer(inside)}
            found += [(at, quote) for at in sorted(places) if begin < at < end for quote in quotes]
        if self._quote:  # words have no quotes, so two of them may stand next to each other
            words = {at for start in self._starts[-4:] for at in range(start + 1, min(start + 64, self._limit))}
            words = {at for at in words if not text[at - 1 : at + 1].isdigit()}
            found += [(at, char) for at in sorted(words) for char in (",", ":", *quotes)]
        found = [each for each in found if text[each[0] : each[0] + 1] not in ("#", "/")]  # no comment begins there
        self._budget.spend(len(found) // 8)
        return sorted(found, key=lambda each: -each[0])

    def _places_of_quotes(self, at: int) -> list[int]:
        """Where a quote may be missing at a token that begins at `at`. White space behind a bracket, colon or comma is usually
        not a part of a string. But if there is more of it than between other tokens, this is not certain."""
        text = self._text
        blanks = _BLANKS.match(text, at)
        if blanks is None or self._quote or text[at - 1] not in _STRUCTURE:
            return [at]
        is_usual = blanks.group() == " " and not self._is_compact
        if is_usual or "\n" in blanks.group():
            return []
        return list(range(*blanks.span()))

    def _closers_at_end(self) -> None:
        """The text ends with a complete value, and brackets around it are open."""
        text = self._text.rstrip()
        if self._error < len(text):
            return
        for added_at, added in [(len(text), ""), *self._insertions()]:
            if added not in ("", "}", "]"):
                continue
            edited = text[:added_at] + added + text[added_at:]
            reader = self._run(edited, added_at)
            if reader.status is Status.STOPPED and not reader.in_string and reader.next is Next.COMMA:
                level = reader.level
                closers = ""
                while level is not None:
                    closers += _CLOSERS[level.opening]
                    level = level.outer
                self._keep(
                    edited + closers,
                    len(edited) + len(closers),
                    len(edited) + len(closers) - len(self._text),
                    len(closers) + len(added),
                )

    def _inner_quotes(self) -> None:
        text = self._text
        num_quotes = 0  # apostrophes aside
        for _ in range(_MOST_INNER_QUOTES):
            self._strings_of(text)
            reader = self._reader
            if reader.status is Status.CLOSED:
                if not self._tail(text[reader.position :]) and num_quotes % 2 == 0:
                    self._keep(text, reader.position, len(text) - len(self._text), num_quotes)
                return
            if not self._strings:
                return
            begin, end = self._strings[-1]
            quote = text[begin]
            if quote not in "\"'" or not text.startswith(quote, end - 1) or not _is_in_words(text, begin, end - 1):
                return
            num_quotes += not (quote == "'" and text[end - 2].isalnum() and text[end : end + 1].isalnum())
            text = f"{text[: end - 1]}\\{text[end - 1 :]}"

    def _strings_of(self, text: str) -> None:
        self._strings.clear()
        reader = self._reader
        reader.restart(State(None, Next.VALUE, has_gap=False), text, 0)
        begin = -1
        is_open = True
        while is_open:
            was_in = reader.in_string
            position = reader.position
            self._budget.spend(1)
            is_open = reader.step()
            if not was_in and reader.in_string:
                begin = position
            elif was_in and not reader.in_string:
                self._strings.append((begin, reader.position))


def translated(
    text: str, *, quote: str = "", schema: ValueSchema | None = None, may_miss_commas: bool = False
) -> tuple[str, int] | None:
    """Returns the JSON of the value with which `text` begins, and where it ends; None if it is not certain."""
    pieces: list[str] = []
    reader = DialectReader(
        lambda _, piece, __: pieces.append(piece), quote=quote, schema=schema, may_miss_commas=may_miss_commas
    )
    reader.feed(text, is_final=True)
    if reader.status is not Status.CLOSED:
        return None
    return ("".join(pieces), reader.position)


def _is_at_structure(text: str, at: int, size: int) -> bool:
    """Whether a quote may be one too many. A quote between words is rather a part of the text."""
    before = text[max(at - 64, 0) : at].rstrip()[-1:]
    behind = text[at + size : at + size + 64].lstrip()[:1]
    return not before or before in _STRUCTURE or not behind or behind in _STRUCTURE


def _is_in_words(text: str, begin: int, at: int) -> bool:
    """Whether words stand on both sides of a quote, so that it neither begins nor ends a string. `begin`: of the string."""
    before = text[begin + 1 : at].rstrip()[-1:]
    behind = text[at + 1 :].lstrip()[:1]
    return bool(before and behind) and before not in "{}[],:;\"'" and behind not in "{}[],:;\"'"
