"""`ToolParser`: finds the tool calls in a text. This base class reads calls that are JSON objects, as most families write them.

Such a call is `{"name": "f", "arguments": {...}}` (Llama writes `parameters`). The call starts when its name is known and its
arguments begin. Then the arguments are passed on as they arrive. Valid JSON does not change, and other text becomes valid JSON
if it has only one reading (`ArgumentsReader`). If the arguments come before the name, or there are none, the call starts at the
end of the object.

If text is malformed before a call has started, it becomes content, unchanged. But if the text is a damaged call that has only
one reading (`repair`), it becomes this call. A call that has started is never taken back. Its arguments are a JSON object; or,
if they have no reading or more than one, what the model wrote. If max_tokens cut them, they end where the text ends. If other
text than the closing markup follows the arguments, this text is content. If the text ends within the closing markup,
this part of the markup is dropped. A call of a tool that the request does not have is passed on too. The client must answer
such a call with an error.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from inflight.parsers.argument_schema import NULLS, ArgumentSchema
from inflight.parsers.arguments_reader import ArgumentsReader, plain_tail, repaired
from inflight.parsers.event_writer import EventWriter, MalformedCallError
from inflight.parsers.later_thoughts import LaterThoughts
from inflight.parsers.repair import Tail, find_reading, translated
from inflight.parsers.repair_budget import RepairBudget
from inflight.parsers.text_reader import ANYTHING, BLANKS, Steps, TextReader

_PLAIN_JSON = re.compile(r'[^{}\[\]",]+')
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_LANGUAGE = re.compile(r"[A-Za-z_]+")
_NOT_BEHIND_TEXT = "_:\"'{"  # what stands here belongs into the text
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which cannot be sent
_LONGEST_NAME = 256  # characters, with the white space around it
_MOST_BEFORE_NAME = 160  # characters in which the first key of a damaged call is, and without a marker also its name
_DAMAGED_CALL = re.compile(r"\{.{0,40}?(?:name|arguments|parameters|type|id)", re.DOTALL)
BRACES = re.compile(r"[} \t\r\n]+")
_NEXT_CALL = re.compile(r"[,;]?\s*\{|\]")
_IGNORED_KEYS = ("id", "type")  # keys of a call that are not used


class ToolParser:
    """Finds the calls in one text. `run` reads the text to its end.

    To *hold* text is to keep it back until it is certain whether it is part of a call. If it is, it is dropped; if not, it
    becomes content (see `EventWriter`).

    Attributes:
        marker: the text with which every call, or list of calls, begins. It is not used if a subclass overrides `run`.
        second_marker: the text with which a call begins if the model has left out `marker`. If other text may contain this
            marker, the subclass accepts only calls of the request's tools.
        ends: texts that end the arguments of a call, even if brackets are open.
        keys: the family's own names of the keys of a call -> the usual names.
        after_marker: in a call, one of these texts follows `marker`. So reasoning that only mentions `marker` is no call.
    """

    marker: ClassVar[str] = ""
    second_marker: ClassVar[str] = ""
    ends: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[Mapping[str, str]] = {}
    after_marker: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def beginnings(cls) -> tuple[str, ...]:
        """The texts with which a call begins; empty if a call begins like other texts."""
        return (cls.marker,) if cls.marker else ()

    # Any: JSON
    def __init__(self, reader: TextReader, writer: EventWriter, tools: Sequence[Mapping[str, Any]]) -> None:
        self._reader = reader
        self._writer = writer
        self._tools = tools
        self._budget = RepairBudget()
        self._schemas: dict[str, ArgumentSchema] = {}  # by tool
        self.later_thoughts = LaterThoughts(reader, writer, "", "")
        # the last character of the content before a marker, white space aside; "" at the beginning and after a call
        self._before = ""
        functions = (tool.get("function", tool) for tool in tools)
        self._tool_names = {function.get("name") for function in functions if isinstance(function, Mapping)}

    @staticmethod
    def make_call_id() -> str:
        """An id for a call, in the form that the family's chat templates accept."""
        return f"call_{secrets.token_hex(12)}"

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.marker, self.second_marker)))

    def is_call_after(self, marker: str) -> Steps[bool]:
        """Whether a call may follow `marker`. If not, the text only mentions the marker."""
        if marker != self.marker or not self.after_marker:
            return True
        return (yield from self._reader.follows(dict.fromkeys(self.after_marker)))

    def run(self) -> Steps[None]:
        """Read content and calls up to the end of the text. By default each call begins with `marker`."""
        while marker := (yield from self._until(*self.markers)):
            self._writer.hold(marker)
            try:
                yield from self._marked_call(marker)
                self._writer.end_call()
                self._before = ""
            except MalformedCallError:
                self._writer.reject()
                self._before = marker[-1]

    def _until(self, *markers: str) -> Steps[str]:
        """Read content, and the reasoning in it, up to one of `markers`, and return it; "" at the end of the text."""
        thoughts = self.later_thoughts
        while True:
            marker = yield from self._reader.until(self._write_content, *markers, *thoughts.begins)
            if marker not in thoughts.begins or not marker:
                return marker
            yield from thoughts.read()

    def _write_content(self, text: str) -> None:
        self.later_thoughts.see(text)
        self._before = text.rstrip()[-1:] or self._before
        self._writer.content(text)

    def _marked_call(self, marker: str) -> Steps[None]:
        """Read what comes after `marker` or `second_marker`: a call or a list of calls, and its closing markup."""
        raise NotImplementedError

    def _hold_literal(self, *literals: str) -> Steps[str]:
        """Hold the literal that comes next in the text, and return it; "" if none of them comes next."""
        found = yield from self._reader.literal(*literals)
        self._writer.hold(found)
        return found

    def _hold_run(self, run: re.Pattern[str]) -> Steps[str]:
        """Hold a run of one class of characters, and return it."""
        pieces: list[str] = []
        while piece := (yield from self._reader.piece(run, self._writer.room)):
            self._writer.hold(piece)
            pieces.append(piece)
        return "".join(pieces)

    def _name(self, run: re.Pattern[str]) -> Steps[str]:
        """Hold the name of a call, which is a run of these characters. White space around it is left out."""
        written = ""
        while piece := (yield from self._reader.piece(run, _LONGEST_NAME - len(written))):
            self._writer.hold(piece)
            written += piece
            if len(written) == _LONGEST_NAME:  # a text in which the marker is only mentioned
                raise MalformedCallError
        name = written.strip()
        if not name.isprintable() or len(name.split()) != 1:
            raise MalformedCallError
        return name

    def _hold_blanks(self) -> Steps[None]:
        yield from self._hold_run(BLANKS)

    def _hold_comments(self) -> Steps[None]:
        """Hold white space and comments of JavaScript and Python."""
        yield from self._hold_blanks()
        while begin := (yield from self._hold_literal("/*", "//", "#")):
            yield from self._hold_up_to("*/" if begin == "/*" else "\n")
            yield from self._hold_blanks()

    def _hold_up_to(self, end: str) -> Steps[None]:
        """Hold the text up to `end`, and `end`."""
        plain = re.compile(f"[^{re.escape(end[0])}]+")
        while not (yield from self._hold_literal(end)) and (yield from self._reader.peek()):
            if not (yield from self._hold_run(plain)):
                self._writer.hold(self._reader.take(1))

    def _hold_fence(self) -> Steps[None]:
        """Hold the line that begins or ends a block of Markdown, if it comes next."""
        if (yield from self._hold_literal("```")):
            yield from self._hold_run(_LANGUAGE)
            yield from self._hold_blanks()

    def _expect(self, *literals: str) -> Steps[str]:
        found = yield from self._hold_literal(*literals)
        if not found:
            if (rest := self._reader.take_cut(*literals)) is not None:
                self._writer.hold(rest)
                self._writer.cut()
            raise MalformedCallError
        return found

    def _call(self, *, is_unmarked: bool = False) -> Steps[None]:
        """Read a call that is a JSON object (see `_object`), or the only one that a damaged object can mean.

        Raises:
            MalformedCallError: the text is not a call; or the call has started, and after its arguments comes something that
                cannot follow.
        """
        num_held = self._writer.num_held
        num_calls = self._writer.num_started
        try:
            yield from self._object(is_unmarked=is_unmarked)
        except MalformedCallError:
            if self._writer.num_started > num_calls:
                raise
            yield from self._damaged_object(num_held, is_unmarked=is_unmarked)

    def _damaged_object(self, num_held: int, *, is_unmarked: bool) -> Steps[None]:
        """Read a call that is a damaged JSON object and has not started. The text behind the first `num_held` characters
        is held."""
        held = self._writer.take_held(num_held)
        self._reader.put_back(held)
        text = ""
        if self._budget.is_left and (yield from self._may_be_damaged_call(is_unmarked=is_unmarked)):
            text = yield from self._text_up_to_end()
        call = None if self._reader.is_cut else self._mended_call(text, is_unmarked=is_unmarked)
        if call is None:
            self._reader.put_back(text)
            self._writer.hold(self._reader.take(len(held)))
            raise MalformedCallError
        name, arguments, end = call
        self._writer.start_call(name)
        self._writer.arguments(arguments)
        self._reader.put_back(text[end:])

    def _may_be_damaged_call(self, *, is_unmarked: bool) -> Steps[bool]:
        start = yield from self._reader.start(_MOST_BEFORE_NAME)
        return bool(_DAMAGED_CALL.match(start)) and (
            not is_unmarked or any(isinstance(name, str) and name in start for name in self._tool_names)
        )

    def _text_up_to_end(self) -> Steps[str]:
        """Consume and return the text up to a text that ends a call."""
        pieces: list[str] = []
        room = self._writer.room
        first = "".join({end[0] for end in self.ends})
        plain = re.compile(f"[^{re.escape(first)}]+") if first else ANYTHING
        while room > 0 and (yield from self._reader.peek()) and not (yield from self._reader.comes(*self.ends)):
            pieces.append((yield from self._reader.piece(plain, room)) or self._reader.take(1))
            room -= len(pieces[-1])
        return "".join(pieces)

    def _mended_call(self, text: str, *, is_unmarked: bool) -> tuple[str, str, int] | None:
        """The name and the arguments of the call that a damaged object means, and where it ends; None if it means none."""
        reading = find_reading(text, _call_tail, self._budget)
        found = json.loads(reading.value) if reading is not None else {}
        call = {key.strip(): value for key, value in found.items()}
        name = call.get("name")
        keys = call.keys() - {"name", *_IGNORED_KEYS}
        if reading is None or not isinstance(name, str) or len(keys) != 1 or not keys <= {"arguments", "parameters"}:
            return None
        arguments = call[keys.pop()]
        if not isinstance(arguments, dict):
            return None
        with suppress(MalformedCallError):
            self._check_name(name, is_unmarked=is_unmarked)
            return name, json.dumps(arguments, ensure_ascii=False), reading.end
        return None

    def _object(self, *, is_unmarked: bool, num_braces: int = 1) -> Steps[None]:
        """Read a call that is a JSON object. Text after its arguments is held.

        Args:
            is_unmarked: whether no marker says that the object is a call. Then it must have a name and arguments. Otherwise
                keys that a call does not have are left out, and {} is written as missing arguments.
            num_braces: how many objects are open behind the arguments: this one, and those around it.

        Raises:
            MalformedCallError: the text is not a call; or the call has started, and after its arguments comes something that
                cannot follow.
        """
        name = ""
        has_other = False
        is_started = False
        arguments: str | None = None
        separator = yield from self._expect("{")
        while separator != "}":
            yield from self._hold_comments()
            key = (yield from self._string()).strip()
            key = self.keys.get(key, key)
            yield from self._hold_blanks()
            yield from self._expect(":")
            yield from self._hold_blanks()
            if key == "name" and not name:
                name = yield from self._string()
                self._check_name(name, is_unmarked=is_unmarked)
            elif key in ("arguments", "parameters") and arguments is None:
                arguments = yield from self._arguments(name, num_braces=num_braces)
                is_started = bool(name)
            elif key == "function" and not name and (yield from self._reader.comes("{")):
                # the form of a call in a request
                yield from self._object(is_unmarked=is_unmarked, num_braces=num_braces + 1)
                is_started = True
            elif key == "name" or (is_unmarked and key not in _IGNORED_KEYS):
                raise MalformedCallError
            else:
                yield from self._hold_value()
                has_other |= key not in _IGNORED_KEYS
            yield from self._hold_comments()
            if (yield from self._reader.comes(*self.ends)):  # the brace is missing
                break
            separator = yield from self._expect(",", "}")
        if is_started:
            return
        if not name or (arguments is None and (is_unmarked or has_other)):
            raise MalformedCallError
        self._writer.start_call(name)
        self._writer.arguments(arguments or "{}")

    def _list_of_calls(self, *, is_unmarked: bool = False) -> Steps[None]:
        """Read a JSON list of calls, whose bracket has been read."""
        separator = ","
        while separator == ",":
            yield from self._hold_blanks()
            yield from self._call(is_unmarked=is_unmarked)
            yield from self._hold_run(BRACES)  # the model may write too many braces
            separator = yield from self._expect(",", "]")

    def _check_name(self, name: str, *, is_unmarked: bool) -> None:
        if not name or not name.isprintable():
            raise MalformedCallError

    def _arguments(self, name: str, *, num_braces: int = 0) -> Steps[str]:
        """Read the arguments of a call. If the name is known, start the call and pass the arguments on. If `name` is "", the
        name comes later: hold the arguments and return them. They may be null, and they may be the text of an object."""
        char = yield from self._reader.peek()
        if char == "{" and name:
            self._writer.start_call(name)
            tail = self._frame_tail(name) if num_braces else plain_tail
            reader = ArgumentsReader(
                self._reader, self._writer.arguments, self.ends, self._budget, tail=tail, num_braces=num_braces
            )
            yield from reader.read()
            return ""
        if char == "{":
            return repaired((yield from self._hold_value()), self._budget)
        if char == '"':
            num_held = self._writer.num_held
            text = _SURROGATE.sub(_escape, (yield from self._string()).strip()) or "{}"
        else:
            yield from self._expect(*NULLS)
            text = "{}"
        if text[0] != "{":
            raise MalformedCallError
        if char == '"' and not (yield from self._ends_text()):  # the quote is superfluous, and the object follows it
            self._reader.put_back(self._writer.take_held(num_held)[1:])
            self._writer.hold(char)
            return (yield from self._arguments(name, num_braces=num_braces))
        if name:
            self._writer.start_call(name)
            self._writer.arguments(repaired(text, self._budget))
        return repaired(text, self._budget)

    def _ends_text(self) -> Steps[bool]:
        """Whether what comes next may stand behind arguments that are the text of an object."""
        char = yield from self._reader.next_visible()
        return not char or not (char.isalnum() or char in _NOT_BEHIND_TEXT)

    def _schema_of(self, tool: str) -> ArgumentSchema:
        if tool not in self._schemas:
            self._schemas[tool] = ArgumentSchema.of_tool(tool, self._tools, self._budget)
        return self._schemas[tool]

    def _frame_tail(self, name: str) -> Tail:
        """What may stand behind the arguments of a call that is a JSON object: the rest of this object."""
        arguments = self._schema_of(name).names()

        def tail(text: str) -> int:
            rest = text.strip()
            if not rest:
                return 1  # the brace of the call is missing
            found = translated('{"arguments": 0 ' + rest)
            if found is None or rest[0] not in ",}/#":
                return 2
            keys = json.loads(found[0]).keys() - {"arguments", *_IGNORED_KEYS}
            if keys and (not arguments or "name" in keys or keys & arguments):
                return 2  # perhaps they belong to the arguments
            behind = rest[found[1] - len('{"arguments": 0 ') :].strip()
            return _call_tail(behind) or (-1 if keys else 0)

        return tail

    def _hold_value(self) -> Steps[str]:
        """Hold a JSON value, and return its text. Only brackets and strings are recognised, to find the end."""
        pieces: list[str] = []
        depth = 0
        in_string = False
        while char := (yield from self._reader.peek()):
            if not in_string and not depth and char in ",}]":
                break
            piece = yield from self._hold_run(_IN_STRING['"'] if in_string else _PLAIN_JSON)
            if not piece:
                piece = self._reader.take(1)
                if char == '"':
                    in_string = not in_string
                elif char == "\\":
                    piece += self._reader.take(1) if (yield from self._reader.peek()) else ""
                else:
                    depth += (char in "{[") - (char in "}]")
                self._writer.hold(piece)
            pieces.append(piece)
            if char in '"}]' and not in_string and not depth:
                break
        return "".join(pieces)

    def _string(self) -> Steps[str]:
        """Hold a string of JSON or Python, and return its value."""
        quote = yield from self._expect('"', "'")
        pieces: list[str] = []
        run = _IN_STRING[quote]
        while (piece := (yield from self._hold_run(run)) or (yield from self._expect(quote, "\\"))) != quote:
            pieces.append(piece if quote == '"' else piece.replace('"', '\\"'))
            if piece == "\\" and (char := (yield from self._reader.peek())):
                self._writer.hold(self._reader.take(1))
                pieces[-1:] = ["'"] if char == "'" else [piece, char]
        try:
            value: str = json.loads(f'"{"".join(pieces)}"', strict=False)
        except json.JSONDecodeError as error:
            raise MalformedCallError from error
        return value


def _call_tail(text: str) -> int:
    """How many edits the text behind a call needs that is a JSON object."""
    behind = text.strip()
    return 0 if _NEXT_CALL.match(behind) else plain_tail(behind)


def _escape(surrogate: re.Match[str]) -> str:
    return f"\\u{ord(surrogate.group()):04x}"
