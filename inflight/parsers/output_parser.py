"""`OutputParser`: a model's text in, events out. It comes in any pieces; what comes out does not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.parsers.event_writer import EventWriter
from inflight.parsers.events import Event
from inflight.parsers.reasoning import ReasoningMarkup, ReasoningParser
from inflight.parsers.text_reader import Steps, TextReader
from inflight.parsers.tool_parser import ANYTHING, ToolParser


class OutputParser:
    """Of one completion; not thread-safe. Work is linear in the text, and memory bounded by a constant beside each piece.

    Nothing that a model writes is an error, and no text is lost but markup and the white space next to it: what is malformed
    comes out as content.

    Attributes:
        needs_special_tokens: the text must have been made with skip_special_tokens=False, or the markup may be missing.
    """

    def __init__(
        self,
        tool_parser: type[ToolParser] | None,
        reasoning: ReasoningMarkup | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),  # Any: JSON
        starts_in_reasoning: bool = False,
        max_tool_calls: int | None = None,
        make_call_id: Callable[[], str] | None = None,
    ) -> None:
        """`make_call_id` is for tests; the family's own otherwise."""
        make_id = make_call_id or (tool_parser or ToolParser).make_call_id
        self._reader = TextReader()
        self._writer = EventWriter(make_id, max_tool_calls)
        self._tools = tool_parser(self._reader, self._writer, tools) if tool_parser is not None else None
        self._reasoning = (
            ReasoningParser(self._reader, self._writer, reasoning, is_inside=starts_in_reasoning)
            if reasoning is not None
            else None
        )
        self.needs_special_tokens = (tool_parser is not None and tool_parser.needs_special_tokens) or (
            reasoning is not None and reasoning.needs_special_tokens
        )
        self._steps = self._run()
        next(self._steps)  # to where it waits for text

    @property
    def num_tool_calls(self) -> int:
        """That began."""
        return self._writer.num_tool_calls

    def push(self, text: str) -> list[Event]:
        """The next piece of the text; what is certain now."""
        if text:
            self._reader.push(text)
            next(self._steps)
        return self._writer.take_events()

    def finish(self) -> list[Event]:
        """The text has ended, maybe in the middle of markup. Call it once, last."""
        self._reader.finish()
        for _ in self._steps:
            raise AssertionError("it waits for text behind the end")
        self._writer.finish()
        return self._writer.take_events()

    def _run(self) -> Steps[None]:
        if self._reasoning is not None:
            yield from self._reasoning.run()
        if self._tools is not None:
            yield from self._tools.run()
        while piece := (yield from self._reader.piece(ANYTHING)):
            self._writer.plain_content(piece)
