"""The tool parser of Qwen3-Coder. It reads calls whose arguments are between tags, and turns the arguments into JSON.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

If the schema of an argument has the type string, or there is no schema, the argument is a string and is passed on as it
arrives. Any other argument is held until it ends. Python's True, False and None then become JSON. Valid JSON is passed on
unchanged, and other text as a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_NAME = re.compile(r"[^<>\r\n]+")
_PLAIN = re.compile(r"[^<\n]+")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderToolParser(ToolParser):
    marker = "<tool_call>"

    def _marked_call(self) -> Steps[None]:
        yield from self._hold_blanks()
        yield from self._expect("<function=")
        name = (yield from self._tag_name()).strip()
        if not name.isprintable() or not name:
            raise MalformedCallError
        self._writer.start_call(name)
        properties = self._properties(name)
        opening = "{"
        yield from self._hold_blanks()
        while (yield from self._expect("<parameter=", "</function>")) != "</function>":
            key = (yield from self._tag_name()).strip()
            self._writer.accept()
            self._writer.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from self._value(is_string=_is_string(properties.get(key)))
            yield from self._hold_blanks()
        self._writer.accept()
        self._writer.arguments("{}" if opening == "{" else "}")
        yield from self._hold_blanks()
        yield from self._expect("</tool_call>")

    def _tag_name(self) -> Steps[str]:
        """Read the rest of a tag, after its "=". Returns the name in it."""
        name = yield from self._hold_run(_NAME)
        yield from self._expect(">")
        return name

    def _value(self, *, is_string: bool) -> Steps[None]:
        """Read an argument up to its closing tag. One line break before it and one after it are markup."""
        if is_string:
            self._writer.arguments('"')
        pieces: list[str] = []
        yield from self._hold_literal("\n")
        while (yield from self._reader.peek()):
            limit = None if is_string else self._writer.room
            if not (piece := (yield from self._reader.piece(_PLAIN, limit))):
                if (yield from self._hold_literal("\n</parameter>", "</parameter>")):
                    self._writer.accept()
                    self._writer.arguments('"' if is_string else _as_json("".join(pieces)))
                    return
                piece = self._reader.take(1)
            if is_string:
                self._writer.arguments(_escaped(piece))
            else:
                self._writer.hold(piece)
                pieces.append(piece)
        self._writer.accept()
        self._writer.arguments("".join(pieces))
        raise MalformedCallError

    def _properties(self, name: str) -> Mapping[str, Any]:  # Any: JSON schemas
        """Returns name -> schema for the parameters of the tool `name`; empty if the request has no such tool."""
        for tool in self._tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and function.get("name") == name:
                parameters = function.get("parameters")
                properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
                return properties if isinstance(properties, Mapping) else {}
        return {}


def _is_string(schema: object) -> bool:
    return not isinstance(schema, Mapping) or schema.get("type") == "string"


def _escaped(text: str) -> str:
    """The text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    text = _PYTHON_WORDS.get(text, text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
