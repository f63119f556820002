"""Llama 3.1 and later: a message that is nothing but JSON objects, `;` between them, sometimes behind a token.

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

A message that begins otherwise holds no calls. What stands behind them is content.
"""

from __future__ import annotations

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser


class Llama3JsonToolParser(ToolParser):
    needs_special_tokens = True

    def run(self) -> Steps[None]:
        try:
            yield from self._hold_blanks()
            yield from self._hold_literal("<|python_tag|>")
            while True:
                yield from self._hold_blanks()
                yield from self._call(needs_arguments=True)
                self._writer.end_call()
                yield from self._hold_blanks()
                yield from self._expect(";")
        except MalformedCallError:
            self._writer.reject()
        yield from self._all_content()
