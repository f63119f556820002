"""The tool parser of Gemma 4. It turns the arguments of a call, which look like JSON without quotes, into JSON.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,units:[<|"|>km<|"|>]}<tool_call|>

Text between two `<|"|>` is a string without escapes, and is passed on as it arrives. A bare word before a colon is a key.
Any other bare word is a value, which is held until it ends.
"""

from __future__ import annotations

import json
import re

from inflight.parsers.event_writer import MAX_HELD
from inflight.parsers.held_value import as_json, escaped
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_NAME = re.compile(r"[^\s<{]+")
_BARE = re.compile(r"[^{}\[\],:<]+")
_QUOTE = '<|"|>'


class Gemma4ToolParser(ToolParser):
    marker = "<|tool_call>"

    def _marked_call(self) -> Steps[None]:
        yield from self._hold_blanks()
        yield from self._expect("call:")
        name = yield from self._name(_NAME)
        yield from self._expect("{")
        self._writer.start_call(name)
        self._writer.arguments("{")
        depth = 1
        while depth and (char := (yield from self._reader.peek())):
            if char in "{}[],:":
                depth += (char in "{[") - (char in "}]")
                self._writer.arguments(self._reader.take(1) + (" " if char in ",:" else ""))
            elif (yield from self._reader.literal(_QUOTE)):
                self._writer.arguments('"')
                if (yield from self._reader.until(self._write_string, _QUOTE)):
                    self._writer.arguments('"')
            else:
                yield from self._bare_word()
        yield from self._hold_blanks()
        yield from self._expect("<tool_call|>")

    def _write_string(self, text: str) -> None:
        self._writer.arguments(escaped(text))

    def _bare_word(self) -> Steps[None]:
        """Read a key or a value without quotes. If the text ends within it, it is passed on as it is. If it is longer than
        `MAX_HELD`, it is a string, which is passed on as it arrives."""
        word = self._reader.take(1)  # it may be a "<" that begins no quote
        pieces: list[str] = [word]
        num_held, is_string = 1, False
        while piece := (yield from self._reader.piece(_BARE, None if is_string else MAX_HELD - num_held)):
            if is_string:
                self._write_string(piece)
                continue
            pieces.append(piece)
            num_held += len(piece)
            if num_held >= MAX_HELD:
                word = "".join(pieces).lstrip()
                pieces, num_held, is_string = [], 0, bool(word)
                self._writer.arguments(f'"{escaped(word)}' if word else "")
        following = yield from self._reader.peek()
        if is_string:
            self._writer.arguments('"' if following else "")
            return
        word = "".join(pieces).strip()
        if word and following == ":":
            word = json.dumps(word, ensure_ascii=False)
        elif word and following:
            word = as_json(word)
        self._writer.arguments(word)
