"""The tool parser of Gemma 4. It turns the arguments of a call, which look like JSON without quotes, into JSON.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,units:[<|"|>km<|"|>]}<tool_call|>

Text between two `<|"|>` is a string without escapes. A bare word before a colon is a key. Any other bare word is a value; the
tool's schema decides its type. Strings in the quotes of JSON are read too.
"""

import re

from inflight.parsers.arguments_reader import ArgumentsReader
from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_NAME = re.compile(r"[^\s<{\"']+")


class Gemma4ToolParser(ToolParser):
    marker, second_marker = "<|tool_call>", "call:"
    ends = ("<tool_call|>", "<|tool_call>")
    after_marker = ("call:",)

    def _marked_call(self, marker: str) -> Steps[None]:
        if marker == self.marker:
            yield from self._hold_blanks()
            yield from self._expect("call:")
        name = yield from self._name(_NAME)
        if marker != self.marker and name not in self._tool_names:
            raise MalformedCallError
        if name.endswith(":") or (yield from self._reader.peek()) != "{":
            raise MalformedCallError
        self._writer.start_call(name)
        schema = self._schema_of(name)
        arguments = ArgumentsReader(
            self._reader, self._writer.arguments, self.ends, self._budget, quote='<|"|>', schema=schema
        )
        yield from arguments.read()
        yield from self._hold_blanks()
        yield from self._expect("<tool_call|>")
