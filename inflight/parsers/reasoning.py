"""`ReasoningParser`: what a model thinks before it answers, between two tags.

The opening tag may be missing: the chat template has written it into the prompt, or the family always begins by thinking.
A closing tag without an opening one is plain text otherwise, since what came before it may have been shown already. All that
stands between the tags is reasoning, a tool call too; without a closing tag it goes to the end of the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from inflight.parsers.event_writer import EventWriter
from inflight.parsers.text_reader import Steps, TextReader
from inflight.parsers.tool_parser import BLANKS


@dataclass(frozen=True, slots=True)
class ReasoningMarkup:
    """
    Attributes:
        needs_special_tokens: the tags are special tokens.
        starts_inside: texts begin with reasoning, the opening tag or not.
    """

    begin: str
    end: str
    needs_special_tokens: bool = False
    starts_inside: bool = False


class ReasoningParser:
    def __init__(self, reader: TextReader, writer: EventWriter, markup: ReasoningMarkup, *, is_inside: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._markup = markup
        self._is_inside = is_inside

    def run(self) -> Steps[None]:
        """The reasoning that the text begins with, if it does, and its closing tag."""
        while piece := (yield from self._reader.piece(BLANKS)):
            self._writer.content(piece)  # which holds it back
        has_tag = yield from self._reader.literal(self._markup.begin)
        if not has_tag and not self._is_inside:
            return
        self._writer.begin_reasoning()
        plain = re.compile(f"[^{re.escape(self._markup.end[0])}]+")
        while (yield from self._reader.peek()):
            if piece := (yield from self._reader.piece(plain)):
                self._writer.reasoning(piece)
            elif (yield from self._reader.literal(self._markup.end)):
                self._writer.end_reasoning()
                return
            else:
                self._writer.reasoning(self._reader.take(1))
