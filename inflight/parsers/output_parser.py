"""`OutputParser`: splits a model's text into content, reasoning and tool calls, while the text arrives piece by piece."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.interface.events import Event
from inflight.parsers.answer_tags import AnswerTags
from inflight.parsers.event_writer import MAX_BUFFERED, EventWriter
from inflight.parsers.later_thoughts import LaterThoughts
from inflight.parsers.reasoning import ReasoningMarkup
from inflight.parsers.text_reader import BLANKS, Steps, TextReader
from inflight.parsers.tool_parser import ToolParser
from inflight.tokenizer.stop_strings import StopSearch


class OutputParser:
    """Parses one completion. Not thread-safe. The time grows linearly with the length of the text, and memory is bounded.

    No text of a model raises an error, because malformed markup becomes content. Only markup and the white space next to it
    are left out.

    Attributes:
        needs_special_tokens: whether the text must be decoded with skip_special_tokens=False, because markup may consist of
            special tokens.
        num_reasoning_pieces: how many pieces were reasoning. The piece that completes a tag does not count. A piece may be
            empty.
    """

    def __init__(
        self,
        tool_parser: type[ToolParser] | None,
        reasoning: ReasoningMarkup | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),  # Any: JSON
        starts_in_reasoning: bool = False,
        keeps_blanks: bool = False,
        only_calls: bool = False,
        thinks_again: bool = False,
        max_tool_calls: int | None = None,
    ) -> None:
        """
        Args:
            keeps_blanks: whether white space between the reasoning and the content is content, not markup.
            thinks_again: whether reasoning may come again behind content and calls.
            only_calls: whether a grammar admits nothing but calls after the reasoning.
        """
        self._reader = TextReader()
        self._writer = EventWriter((tool_parser or ToolParser).make_call_id, max_tool_calls, keeps_blanks=keeps_blanks)
        if reasoning is not None and (reasoning.answer_begins or reasoning.answer_ends):
            self._writer.answer_tags = AnswerTags(reasoning.answer_begins, reasoning.answer_ends)
        self._tools = tool_parser(self._reader, self._writer, tools) if tool_parser is not None else None
        self._reasoning = reasoning
        tags = ("", "") if reasoning is None or not thinks_again else (reasoning.begin, reasoning.end)
        self._later_thoughts = LaterThoughts(self._reader, self._writer, *tags)
        if self._tools is not None:
            self._tools.later_thoughts = self._later_thoughts
        self._only_calls = only_calls
        self._starts_in_reasoning = starts_in_reasoning
        # the markup of calls consists of special tokens in some models
        self.needs_special_tokens = tool_parser is not None or (
            reasoning is not None and reasoning.needs_special_tokens
        )
        self._writer.is_reasoning = starts_in_reasoning
        self._num_first_pieces = 0  # of reasoning that is known to be reasoning
        self._steps = self._run()
        next(self._steps)  # runs until it waits for text

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._writer.is_reasoning

    @property
    def num_reasoning_pieces(self) -> int:
        return self._num_first_pieces + self._later_thoughts.num_pieces

    def search_content(self, stop_search: StopSearch | None) -> None:
        """Let the content end at the first stop string. Stop strings in the reasoning and in calls do not count."""
        self._writer.stop_search = stop_search

    def push(self, text: str, *, may_stop: bool = True) -> list[Event]:
        """Read the next piece of the text. Returns the events that are certain now.

        Args:
            may_stop: if False, a stop string may begin in the text, but not end there.
        """
        self._writer.may_stop = may_stop
        was_reasoning = self.is_reasoning
        num_begun = self._later_thoughts.num_begun
        if text:
            self._reader.push(text)
            next(self._steps)
        self._num_first_pieces += was_reasoning and self.is_reasoning
        if self._later_thoughts.num_begun == num_begun:
            self._later_thoughts.add_piece()
        return self._writer.take_events()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """End the text, which may be in the middle of markup. Call this once, after all other methods. Returns the
        remaining events.

        Args:
            is_cut: whether a limit has ended the text. Arguments that have begun then stay as they are. Otherwise they are
                completed to JSON.
        """
        self._writer.drops_content = self._only_calls and is_cut
        self._reader.finish(is_cut=is_cut)
        for _ in self._steps:
            raise AssertionError("the parser waits for text after the end")
        self._writer.finish()
        return self._writer.take_events()

    def _run(self) -> Steps[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._tools is not None:
            yield from self._tools.run()
        thoughts = self._later_thoughts
        while (yield from self._reader.until(self._write_content, *thoughts.begins)) if thoughts.begins else False:
            yield from thoughts.read()
        yield from self._reader.all(self._writer.plain_content)

    def _write_content(self, text: str) -> None:
        self._later_thoughts.see(text)
        self._writer.plain_content(text)

    def _read_reasoning(self, markup: ReasoningMarkup) -> Steps[None]:
        """Read the reasoning at the beginning of the text, if there is any, and its closing tag.

        The opening tag may be missing, because the chat template has written it into the prompt, or because the family always
        begins by thinking. In all other cases a closing tag without an opening tag is content, because the text before it
        may have been shown already. All text between the tags is reasoning, even a tool call. If there is no closing tag,
        the text from the opening tag to the first call is reasoning. So text that may be a call is held until the closing tag
        or the end of the text comes.
        """
        while piece := (yield from self._reader.piece(BLANKS)):
            self._writer.content(piece)  # the writer holds white space back
        if not (yield from self._reader.literal(markup.begin)) and not self._starts_in_reasoning:
            return
        self._writer.begin_reasoning()
        markers = () if self._tools is None else self._tools.markers
        while tag := (yield from self._reader.until(self._writer.reasoning, markup.end, *markers)):
            if tag == markup.end:
                self._writer.end_reasoning()
                return
            assert self._tools is not None
            if not (yield from self._tools.is_call_after(tag)):
                self._writer.reasoning(tag)
                continue
            thought = _BufferedThought(self._writer.reasoning)
            thought.write(tag)
            if (yield from self._reader.until(thought.write, markup.end)):
                thought.release()
                self._writer.end_reasoning()
            elif thought.is_held:  # no closing tag has come: it is a call
                self._writer.stay_in_reasoning()
                self._reader.put_back(thought.text)
            return


class _BufferedThought:
    """Text that is reasoning if the closing tag comes, and otherwise a call. It is held; if it is too long, it is reasoning."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._pieces: list[str] = []
        self._num_held = 0
        self.is_held = True

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def write(self, text: str) -> None:
        if not self.is_held:
            self._write(text)
            return
        self._pieces.append(text)
        self._num_held += len(text)
        if self._num_held > MAX_BUFFERED:
            self.release()

    def release(self) -> None:
        if self.is_held:
            self.is_held = False
            self._write(self.text)
