"""Mistral: a token, then a list of JSON objects; since tokenizer v11 a token, name and arguments for each call.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]
    [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}
    [TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}

Its chat templates take back ids of 9 letters and digits only.
"""

from __future__ import annotations

import re
import secrets
import string

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_ID_CHARACTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[^\s\[\]{}\"]+")
_CALL_ID = re.compile(r"[A-Za-z0-9]+")


class MistralToolParser(ToolParser):
    needs_special_tokens = True

    @staticmethod
    def make_call_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def run(self) -> Steps[None]:
        while (yield from self._content_until("[TOOL_CALLS]")):
            try:
                yield from self._hold_blanks()
                if (yield from self._hold_literal("[")):
                    yield from self._calls()
                else:
                    yield from self._named_call()
                self._writer.end_call()
            except MalformedCallError:
                self._writer.reject()

    def _calls(self) -> Steps[None]:
        """The list behind its first bracket."""
        separator = ","
        while separator == ",":
            yield from self._hold_blanks()
            yield from self._call()
            yield from self._hold_blanks()
            separator = yield from self._expect(",", "]")

    def _named_call(self) -> Steps[None]:
        name = yield from self._hold_run(_NAME)
        if not name.isprintable() or not name:
            raise MalformedCallError
        yield from self._hold_blanks()
        marker = yield from self._hold_literal("[CALL_ID]", "[ARGS]")
        if marker == "[CALL_ID]":
            yield from self._hold_run(_CALL_ID)
            yield from self._expect("[ARGS]")
        yield from self._hold_blanks()
        yield from self._arguments(name)
