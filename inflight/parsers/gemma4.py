"""The tool parsers of Gemma 4 and FunctionGemma. They turn the arguments of a call, which look like JSON without quotes, into
JSON.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,units:[<|"|>km<|"|>]}<tool_call|>

Text between two `<|"|>` (FunctionGemma: `<escape>`) is a string without escapes. A bare word before a colon is a key. Any other
bare word is a value; the tool's schema decides its type. Strings in the quotes of JSON are read too.
"""

import re
from typing import ClassVar

from inflight.parsers.arguments_reader import ArgumentsReader
from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_NAME = re.compile(r"[^\s<{\"']+")


class Gemma4ToolParser(ToolParser):
    """
    Attributes:
        quote: around strings.
        end: the tag behind a call.
    """

    marker = "<|tool_call>"
    second_marker = "call:"
    end: ClassVar[str] = "<tool_call|>"
    ends = (end, marker)
    quote: ClassVar[str] = '<|"|>'
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
            self._reader, self._writer.arguments, self.ends, self._budget, quote=self.quote, schema=schema
        )
        yield from arguments.read()
        yield from self._hold_blanks()
        yield from self._expect(self.end)


class FunctionGemmaToolParser(Gemma4ToolParser):
    """For FunctionGemma, a Gemma 3. Behind its calls it writes the tag with which results begin.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call><start_function_response>
    """

    marker = "<start_function_call>"
    end = "<end_function_call>"
    ends = (end, marker)
    quote = "<escape>"

    def _marked_call(self, marker: str) -> Steps[None]:
        yield from super()._marked_call(marker)
        yield from self._hold_literal("<start_function_response>")
