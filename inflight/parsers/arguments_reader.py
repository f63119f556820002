"""`ArgumentsReader`: reads the arguments of a call as models write them, and writes an object of JSON.

Valid JSON is written unchanged. Other text that has only one meaning as JSON is written as this JSON (`DialectReader`). Both
are written while the text arrives, but `LAG` characters late, so that a fault can still be mended where it is. After a fault
nothing is written until the arguments have ended. If only one reading of the rest is possible (`find_reading`), this reading
is written. Otherwise the rest is written exactly as the model wrote it. Then the arguments are no JSON, and the client can
answer the model that they are malformed.
"""

import json
import re
from collections import deque
from collections.abc import Callable

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.event_writer import MAX_BUFFERED
from inflight.parsers.json_dialect import DialectReader
from inflight.parsers.json_states import Status
from inflight.parsers.odd_values import is_torn, lacks_bracket
from inflight.parsers.repair import Tail, find_reading, only_value
from inflight.parsers.repair_budget import RepairBudget
from inflight.parsers.text_reader import ANYTHING, Steps, TextReader

LAG = 128  # characters that are written late
_MOST_WITHOUT_REPAIR = 2048  # characters that are held to find where damaged arguments end, if they cannot be mended
_JSON = "{}[]:\"'"
_NOT_BEHIND = ",:;}])\"'"
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(r'[{}\[\]]|"(?:[^"\\]|\\.)*"', re.DOTALL)


def plain_tail(text: str) -> int:
    """How many edits the text behind arguments needs, if any text may stand there that has nothing of JSON."""
    behind = text.strip()
    if not behind.startswith((",", ";")) and not any(char in _JSON for char in behind):
        return 0
    return 1 if len(behind) == 1 else 2


class ArgumentsReader:
    """
    Args:
        stops: texts that end the arguments, even if brackets are open. In a string they do not count.
        budget: of the answer, for the repair of damaged arguments.
        quote, schema: as in `DialectReader`.
        tail: which text may stand behind the arguments.
        num_braces: how many JSON objects are around the arguments, and so how many closing braces stand behind them.
    """

    def __init__(
        self,
        reader: TextReader,
        write: Callable[[str], None],
        stops: tuple[str, ...],
        budget: RepairBudget,
        *,
        quote: str = "",
        schema: ArgumentSchema | None = None,
        tail: Tail = plain_tail,
        num_braces: int = 0,
    ) -> None:
        self._reader = reader
        self._write = write
        self._stops = stops
        self._budget = budget
        self._quote = quote
        self._schema = schema
        self._tail = tail
        self._num_braces = num_braces
        self._dialect = DialectReader(self._add_piece, stops=stops, quote=quote, schema=schema)
        self._late: deque[tuple[int, str, bool]] = deque()  # pieces of JSON that are not written yet
        self._num_passed = 0  # characters of the model's text whose JSON has been written
        self._written: list[str] = []  # this JSON, as long as the whole text may be mended
        self._text: deque[str] = deque()  # the model's text from `_text_start` on
        self._text_start = 0
        self._num_read = 0

    def read(self) -> Steps[None]:
        """Read an object, whose brace comes next."""
        dialect = self._dialect
        has_ended = False
        while dialect.status is Status.OPEN and not has_ended:
            has_ended = not (yield from self._reader.peek())
            if has_ended and self._reader.is_cut:  # what was written stays as it is
                self._write_up_to(dialect.position)
                self._write(dialect.unwritten + dialect.rest)
                return
            text = yield from self._reader.piece(ANYTHING)
            self._text.append(text)
            self._num_read += len(text)
            dialect.feed(text, is_final=has_ended)
            self._write_up_to(dialect.position - LAG)
        self._reader.put_back(dialect.rest)
        if dialect.status is Status.CLOSED and (yield from self._is_end()):
            self._write_up_to(dialect.position)
            return
        self._write_up_to(dialect.position - LAG)
        yield from self._mend()

    # -- writing late --------------------------------------------------------------------------------------------------

    def _add_piece(self, end: int, piece: str, is_same: bool) -> None:
        self._late.append((end, piece, is_same))

    def _write_up_to(self, position: int) -> None:
        """Write the JSON of the model's text up to `position`."""
        while self._late:
            end, piece, is_same = self._late[0]
            if end > position:
                num_chars = position - (end - len(piece))
                if is_same and num_chars > 0:
                    self._late[0] = (end, piece[num_chars:], True)
                    self._pass_on(piece[:num_chars], position)
                break
            self._late.popleft()
            self._pass_on(piece, end)
        if self._num_read > MAX_BUFFERED:  # only a faithful copy is possible now
            self._written.clear()
            while len(self._text) > 1 and self._text_start + len(self._text[0]) <= self._num_passed:
                self._text_start += len(self._text.popleft())

    def _pass_on(self, piece: str, end: int) -> None:
        self._num_passed = end
        self._written.append(piece)
        self._write(piece)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _is_end(self) -> Steps[bool]:
        """Whether the text goes on behind the closing bracket as it must."""
        char = yield from self._reader.next_visible()
        if not char and self._reader.is_cut:
            return True
        if is_torn(self._last_read(3), (yield from self._reader.peek())):
            return False
        if not self._num_braces:
            return not char or char not in _NOT_BEHIND
        if char != "}":
            return False
        closing = yield from self._reader.next_visible(self._num_braces + 1)
        is_one_too_many = closing == "}" * (self._num_braces + 1)
        return not (is_one_too_many and self._may_have_one_too_many())

    def _last_read(self, num_chars: int) -> str:
        """The last characters that the dialect's reader has read."""
        end = self._dialect.position - self._text_start
        return "".join(self._text)[max(end - num_chars, 0) : end]

    def _may_have_one_too_many(self) -> bool:
        """Whether the superfluous brace may be one in the arguments, or may belong into one of their strings."""
        text = "".join(self._text)[: self._dialect.position - self._text_start]
        strings = _STRINGS.findall(text)
        return any(lacks_bracket(each, "}") for each in strings) or "}" in _STRINGS.sub("", text).rstrip("}] \t\r\n")

    def _mend(self) -> Steps[None]:
        """Write the rest of the arguments, which have a fault at the position of the dialect's reader."""
        num_good = self._dialect.position
        rest: list[str] = []
        num_rest = 0
        most = MAX_BUFFERED if self._budget.is_left else _MOST_WITHOUT_REPAIR
        beginnings = "".join({stop[0] for stop in self._stops})
        plain = re.compile(f"[^{re.escape(beginnings)}]+") if beginnings else ANYTHING
        while (yield from self._reader.peek()) and not (yield from self._reader.comes(*self._stops)):
            piece = (yield from self._reader.piece(plain)) or self._reader.take(1)
            rest.append(piece)
            num_rest += len(piece)
            if num_good + num_rest > most:
                self._write_rest(num_good, rest)
                rest = []
                num_good = self._num_passed
        is_cut = yield from self._reader.is_at_cut()
        if is_cut and self._dialect.status is Status.CLOSED:
            self._write_up_to(num_good)
            self._reader.put_back("".join(rest))
            return
        if num_good + num_rest > most or is_cut:
            self._write_rest(num_good, rest)
            return
        text = "".join(self._text)[:num_good] + "".join(rest)
        written = "".join(self._written)
        for end in (*self._stops_in_last_string(text[:num_good]), len(text)):
            reading = find_reading(
                text[:end], self._tail, self._budget, written=written, quote=self._quote, schema=self._schema
            )
            if reading is not None:
                self._write(reading.value[len(written) :])
                self._reader.put_back(text[reading.end :])
                return
        end = self._end_of_damaged(text)
        if _is_json(written + text[self._num_passed : end]):
            end -= 1  # so the last bracket closes what is around the arguments
        self._write(text[self._num_passed : end])
        self._reader.put_back(text[end:])

    def _stops_in_last_string(self, good: str) -> list[int]:
        """Where the arguments may have ended if the last string has no closing quote. `good`: the text before the fault."""
        found = [good.find(stop, self._dialect.string_start) for stop in self._stops]
        return sorted(at for at in found if at >= 0)[:1]

    def _write_rest(self, num_good: int, rest: list[str]) -> None:
        """Write the model's text as it is: from what was written last up to `num_good`, and `rest`."""
        known = "".join(self._text)[self._num_passed - self._text_start : num_good - self._text_start]
        self._num_passed = num_good
        self._write(known + "".join(rest))

    def _end_of_damaged(self, text: str) -> int:
        """Where damaged arguments end: behind the bracket that closes the first one, if the text goes on as it must there."""
        depth = 0
        for found in _BRACKETS.finditer(text):
            depth += (found.group() in "{[") - (found.group() in "}]")
            if not depth and not found.group().startswith('"'):
                if self._tail(text[found.end() :]) <= 0:
                    return found.end()
                break
        text = text.rstrip()
        return len(text) - (self._num_braces > 0 and text.endswith("}"))


def repaired(text: str, budget: RepairBudget) -> str:
    """The JSON that a text means which begins with a brace; if this is not certain, the text itself."""
    found = only_value(text, budget)
    return text if found is None else found


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
