"""`ToolParser`: content and the calls in it, by a family's markup; and what the families have in common.

Calls are JSON objects in most of them, `{"name": "f", "arguments": {...}}` (Llama: `parameters`), that this file reads: the
name is known when a call starts, and the arguments are passed on as the model writes them, character by character.

What is malformed before a call has started is content, as it stands. Once a call has started nothing takes it back: arguments
that end before their last brace stay as they are, and what stands behind them instead of the closing markup is content. If
the text ends within the closing markup (max_tokens cut it), this part of the markup is dropped.
A name that is none of the request's tools is passed on: the client answers it, as it does for an unknown argument.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from inflight.parsers.event_writer import EventWriter, MalformedCallError
from inflight.parsers.text_reader import Steps, TextReader

ANYTHING = re.compile(r"(?s:.)+")
BLANKS = re.compile(r"[ \t\r\n]+")
_PLAIN_JSON = re.compile(r'[^{}\[\]"]+')
_IN_STRING = re.compile(r'[^"\\]+')
_STARTED = "started"  # stands for arguments that have been passed on; no JSON object
_IGNORED_KEYS = ("id", "type")  # their values are strings, and say nothing that is not known


class ToolParser(ABC):
    """Made for one text. `run` reads all of it that is left.

    Attributes:
        needs_special_tokens: the markup is, or may be, special tokens: the text must have been made with
            skip_special_tokens=False.
    """

    needs_special_tokens: ClassVar[bool] = False

    def __init__(
        self, reader: TextReader, writer: EventWriter, tools: Sequence[Mapping[str, Any]]
    ) -> None:  # Any: JSON
        self._reader = reader
        self._writer = writer
        self._tools = tools

    @staticmethod
    def make_call_id() -> str:
        """An id for a call, as the family's chat template takes it back."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def run(self) -> Steps[None]:
        """Content and calls, to the end of the text."""

    def _content_until(self, marker: str) -> Steps[bool]:
        """Content; then `marker`, which is held. Whether it came before the text's end."""
        plain = re.compile(f"[^{re.escape(marker[0])}]+")
        while (yield from self._reader.peek()):
            if piece := (yield from self._reader.piece(plain)):
                self._writer.content(piece)
            elif (yield from self._hold_literal(marker)):
                return True
            else:
                self._writer.content(self._reader.take(1))
        return False

    def _all_content(self) -> Steps[None]:
        """Content up to the text's end."""
        while piece := (yield from self._reader.piece(ANYTHING)):
            self._writer.content(piece)

    def _hold_literal(self, *literals: str) -> Steps[str]:
        """The one that the text goes on with, held; "" for none."""
        found = yield from self._reader.literal(*literals)
        self._writer.hold(found)
        return found

    def _hold_run(self, run: re.Pattern[str]) -> Steps[str]:
        """A run of one class of characters, held."""
        pieces: list[str] = []
        while piece := (yield from self._reader.piece(run, self._writer.room)):
            self._writer.hold(piece)
            pieces.append(piece)
        return "".join(pieces)

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
        """A call as a JSON object. What stands behind its arguments is held.

        Args:
            needs_arguments: without them it is no call; else they are {}.

        Raises:
            MalformedCallError: none has started; or it has, and something else than the object's end follows.
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
                name = yield from self._name()
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

    def _name(self) -> Steps[str]:
        name = yield from self._string()
        if not name or not name.isprintable():
            raise MalformedCallError
        return name

    def _arguments(self, name: str) -> Steps[str]:
        """Arguments of a call that they start, or, where its name is still to come, held and returned."""
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
        """A JSON object, as it stands: brackets are counted and strings known, the rest is not looked at."""
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
        """A JSON string, held; its value."""
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
