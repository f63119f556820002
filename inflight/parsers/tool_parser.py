"""`ToolParser`: finds the tool calls in a text. This base class reads calls that are JSON objects, as most families write them.

Such a call is `{"name": "f", "arguments": {...}}` (Llama writes `parameters`). The call starts when its name
is known and its arguments begin. Then the arguments are passed on unchanged, as they arrive. If the arguments come before the
name, or there are none, the call starts at the end of the object.

If text is malformed before a call has started, it becomes content, unchanged. A call that has started is never taken back.
If its arguments end before their last brace, they are passed on as they are. If other text than the closing markup follows the
arguments, this text is content. If the text ends within the closing markup (max_tokens cut it), this part of the markup is
dropped. A call of a tool that the request does not have is passed on too. The client must answer such a call with an error.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from inflight.parsers.event_writer import EventWriter, MalformedCallError
from inflight.parsers.text_reader import Steps, TextReader

BLANKS = re.compile(r"[ \t\r\n]+")
_PLAIN_JSON = re.compile(r'[^{}\[\]"]+')
_IN_STRING = re.compile(r'[^"\\]+')
_STARTED = "started"  # what `_arguments` returns if it has passed the arguments on
_IGNORED_KEYS = ("id", "type")  # keys of a call whose values are strings that are not used


class ToolParser:
    """Finds the calls in one text. `run` reads the text to its end.

    To *hold* text is to keep it back until it is certain whether it is part of a call. If it is, it is dropped; if not, it
    becomes content (see `EventWriter`).

    Attributes:
        marker: the text with which every call, or list of calls, begins. It is not used if a subclass overrides `run`.
    """

    marker: ClassVar[str] = ""

    @classmethod
    def beginnings(cls) -> tuple[str, ...]:
        """The texts with which a call begins; empty if a call begins like other texts."""
        return (cls.marker,) if cls.marker else ()

    def __init__(
        self, reader: TextReader, writer: EventWriter, tools: Sequence[Mapping[str, Any]]
    ) -> None:  # Any: JSON
        self._reader = reader
        self._writer = writer
        self._tools = tools

    @staticmethod
    def make_call_id() -> str:
        """An id for a call, in the form that the family's chat templates accept."""
        return f"call_{secrets.token_hex(12)}"

    def run(self) -> Steps[None]:
        """Read content and calls up to the end of the text. By default each call begins with `marker`."""
        while (yield from self._reader.until(self._writer.content, self.marker)):
            self._writer.hold(self.marker)
            try:
                yield from self._marked_call()
                self._writer.end_call()
            except MalformedCallError:
                self._writer.reject()

    def _marked_call(self) -> Steps[None]:
        """Read what comes after `marker`: a call or a list of calls, and its closing markup."""
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
        name = (yield from self._hold_run(run)).strip()
        if not name.isprintable() or len(name.split()) != 1:
            raise MalformedCallError
        return name

    def _hold_blanks(self) -> Steps[None]:
        yield from self._hold_run(BLANKS)

    def _expect(self, *literals: str) -> Steps[str]:
        found = yield from self._hold_literal(*literals)
        if not found:
            if (rest := self._reader.take_cut(*literals)) is not None:
                self._writer.hold(rest)
                self._writer.cut()
            raise MalformedCallError
        return found

    def _call(self, *, needs_arguments: bool = False) -> Steps[None]:
        """Read a call that is a JSON object. Text after its arguments is held.

        Args:
            needs_arguments: if True, an object without arguments is not a call. If False, {} is written as its arguments.

        Raises:
            MalformedCallError: the text is not a call; or the call has started, and after its arguments comes something else
                than the keys `id` and `type` and the closing brace.
        """
        name = arguments = ""
        separator = yield from self._expect("{")
        while separator != "}":
            yield from self._hold_blanks()
            key = yield from self._string()
            yield from self._hold_blanks()
            yield from self._expect(":")
            yield from self._hold_blanks()
            if key == "name" and not name:
                name = yield from self._string()
                if not name or not name.isprintable():
                    raise MalformedCallError
            elif key in ("arguments", "parameters") and not arguments:
                arguments = yield from self._arguments(name)
            elif key in _IGNORED_KEYS:
                yield from self._string()
            else:
                raise MalformedCallError
            yield from self._hold_blanks()
            separator = yield from self._expect(",", "}")
        if arguments == _STARTED:
            return
        if not name or (not arguments and needs_arguments):
            raise MalformedCallError
        self._writer.start_call(name)
        self._writer.arguments(arguments or "{}")

    def _arguments(self, name: str) -> Steps[str]:
        """Read the arguments of a call. If the name is known, start the call and pass the arguments on. If `name` is "", the
        name comes later: hold the arguments and return them."""
        if (yield from self._reader.peek()) != "{":
            raise MalformedCallError
        if name:
            self._writer.start_call(name)
            yield from self._object(self._writer.arguments)
            return _STARTED
        pieces: list[str] = []
        yield from self._object(pieces.append, is_held=True)
        return "".join(pieces)

    def _object(self, write: Callable[[str], None], *, is_held: bool = False) -> Steps[None]:
        """Read a JSON object, and write it unchanged. Only brackets and strings are recognised, to find the end."""
        depth = 0
        in_string = False
        while char := (yield from self._reader.peek()):
            limit = self._writer.room if is_held else None
            piece = yield from self._reader.piece(_IN_STRING if in_string else _PLAIN_JSON, limit)
            if not piece:
                piece = self._reader.take(1)
                if char == '"':
                    in_string = not in_string
                elif char == "\\":
                    piece += self._reader.take(1) if (yield from self._reader.peek()) else ""
                else:
                    depth += 1 if char in "{[" else -1
            if is_held:
                self._writer.hold(piece)
            write(piece)
            if depth == 0:
                return

    def _string(self) -> Steps[str]:
        """Hold a JSON string, and return its value."""
        yield from self._expect('"')
        pieces: list[str] = []
        while (piece := (yield from self._hold_run(_IN_STRING)) or (yield from self._expect('"', "\\"))) != '"':
            pieces.append(piece)
            if piece == "\\" and (yield from self._reader.peek()):
                pieces.append(self._reader.take(1))
                self._writer.hold(pieces[-1])
        try:
            value: str = json.loads(f'"{"".join(pieces)}"', strict=False)
        except json.JSONDecodeError as error:
            raise MalformedCallError from error
        return value
