"""Hermes, Qwen 2.5 and 3, and the embedded model: each call a JSON object between tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser


class HermesToolParser(ToolParser):
    needs_special_tokens = True  # in some models the tags are special tokens, in most they are not

    def run(self) -> Steps[None]:
        while (yield from self._content_until("<tool_call>")):
            try:
                yield from self._hold_blanks()
                yield from self._call()
                yield from self._hold_blanks()
                yield from self._expect("</tool_call>")
                self._writer.end_call()
            except MalformedCallError:
                self._writer.reject()
