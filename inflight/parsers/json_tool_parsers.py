"""Tool parsers for the families that write the arguments of a call as JSON: Hermes, Llama, Mistral and DeepSeek."""

import re
import secrets
import string
from collections.abc import Mapping
from typing import ClassVar

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import BRACES, ToolParser

_ID_CHARACTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[^\s\[\]{}\"]+")
_DEEPSEEK_NAME = re.compile(r"[^\s<>{}`]+")
_FUNCTION_NAME = re.compile(r"[^\s<>{}\"]+")
_LLAMA_MARKERS = (
    "<|python_tag|>",
    "<function=",
    '{"name"',
    '{"type"',
    "{'name'",
)  # with which a call begins behind other text
_CALL_ID = re.compile(r"[A-Za-z0-9]+")


class HermesToolParser(ToolParser):
    """For Hermes, Qwen 2.5, Qwen 3 and the model that Inflight contains. Each call is a JSON object between tags.

        <tool_call>
        {"name": "get_weather", "arguments": {"city": "Paris"}}
        </tool_call>

    A list of such objects and a block of Markdown around them are read too. If the tool is one of the request's, the tag may be
    `<tools>` (Qwen2.5-Coder) or only a block of JSON in Markdown, and at the beginning of the text it may be missing.
    """

    marker = "<tool_call>"
    second_marker = "<tools>"
    ends = ("</tool_call>", "<tool_call>", "</tools>", "```")
    after_marker = ("{", "[", "```")

    @property
    def markers(self) -> tuple[str, ...]:
        return (*super().markers, "```json")

    def is_call_after(self, marker: str) -> Steps[bool]:
        if marker == self.marker:
            return (yield from super().is_call_after(marker))
        return (yield from self._reader.follows({"{": {'"name"': None}, "[": {"{": None}}))

    def run(self) -> Steps[None]:
        try:
            yield from self._hold_blanks()
            yield from self._hold_fence()
            while (yield from self._reader.comes("{")):
                yield from self._call(is_unmarked=True)
                self._writer.end_call()
                yield from self._end_of_unmarked()
        except MalformedCallError:
            pass
        self._writer.reject()
        yield from super().run()

    def _marked_call(self, marker: str) -> Steps[None]:
        is_unmarked = marker != self.marker
        yield from self._hold_blanks()
        yield from self._hold_fence()
        while True:
            if (yield from self._hold_literal("[")):
                yield from self._list_of_calls(is_unmarked=is_unmarked)
            else:
                yield from self._call(is_unmarked=is_unmarked)
            if not is_unmarked:
                break
            yield from self._end_of_unmarked()
            if not (yield from self._reader.comes("{", "[")):
                return
        yield from self._end_of_calls()

    def _end_of_unmarked(self) -> Steps[None]:
        """Hold what may stand behind a call that has no tag of its own. Braces, a fence and a closing tag are markup."""
        self._writer.end_call()
        braces = yield from self._hold_run(BRACES)
        fence = yield from self._hold_literal("```", "</tool_call>", "</tools>")
        if fence or "}" in braces:
            self._writer.end_call()
        yield from self._hold_blanks()

    def _end_of_calls(self) -> Steps[None]:
        yield from self._hold_run(BRACES)  # the model may write too many braces
        yield from self._hold_fence()
        yield from self._expect("</tool_call>")
        self._writer.end_call()

    def _check_name(self, name: str, *, is_unmarked: bool) -> None:
        super()._check_name(name, is_unmarked=is_unmarked)
        if is_unmarked and name not in self._tool_names:
            raise MalformedCallError


class Llama3JsonToolParser(ToolParser):
    """For Llama 3.1 and later. Calls are JSON objects. The token `<|python_tag|>` may come first.

        <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}
        <function=get_weather>{"city": "Paris"}</function>

    Between two calls `;`, a comma or only white space may stand. A list of calls and a block of Markdown around them are
    read too.
    Behind other text only calls of the request's tools count, and none if a tool is strict: its grammar admits calls only
    at the
    beginning.
    """

    after_function: ClassVar[str] = "</function>"

    @property
    def markers(self) -> tuple[str, ...]:
        return _LLAMA_MARKERS

    def run(self) -> Steps[None]:
        self._is_behind_text = False
        yield from self._calls()
        functions = (tool.get("function", tool) for tool in self._tools)
        if any(isinstance(function, Mapping) and function.get("strict") for function in functions):
            yield from self._reader.all(self._writer.content)
            return
        self._is_behind_text = True
        while marker := (yield from self._until(*self.markers, "```")):
            self._reader.put_back(marker)
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        """Read calls up to text that is none. Text that may have begun a call becomes content."""
        try:
            while True:
                yield from self._hold_blanks()
                yield from self._hold_literal("<|python_tag|>")
                yield from self._hold_blanks()
                yield from self._hold_fence()
                if (yield from self._hold_literal("<function=")):
                    yield from self._function()
                elif (yield from self._hold_literal("[")):
                    yield from self._list_of_calls(is_unmarked=True)
                else:
                    yield from self._call(is_unmarked=True)
                self._writer.end_call()
                yield from self._hold_blanks()
                if (yield from self._hold_literal("```")):
                    self._writer.end_call()
                yield from self._hold_blanks()
                yield from self._hold_literal(";", ",")
        except MalformedCallError:
            self._writer.reject()

    def _function(self) -> Steps[None]:
        name = yield from self._name(_FUNCTION_NAME)
        self._check_name(name, is_unmarked=True)
        yield from self._expect(">")
        yield from self._hold_blanks()
        yield from self._arguments(name)
        yield from self._hold_blanks()
        yield from self._hold_literal(self.after_function)

    def _check_name(self, name: str, *, is_unmarked: bool) -> None:
        super()._check_name(name, is_unmarked=is_unmarked)
        if self._is_behind_text and name not in self._tool_names:
            raise MalformedCallError


class MistralToolParser(ToolParser):
    """For Mistral. After the token `[TOOL_CALLS]` comes a list of JSON objects. Since Mistral's tokenizer v11 each of these
    tokens begins a single call, with the name and the arguments.

        [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]
        [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}
        [TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}

    In the later messages of a chat, Mistral's chat templates accept only call ids of 9 letters and digits.
    """

    marker = "[TOOL_CALLS]"
    ends = ("[TOOL_CALLS]",)

    @staticmethod
    def make_call_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def _marked_call(self, marker: str) -> Steps[None]:
        yield from self._hold_blanks()
        if (yield from self._hold_literal("[")):
            yield from self._list_of_calls()
        elif (yield from self._reader.comes("{")):
            yield from self._call()
        else:
            yield from self._named_call()

    def _named_call(self) -> Steps[None]:
        name = yield from self._name(_NAME)
        yield from self._hold_blanks()
        marker = yield from self._hold_literal("[CALL_ID]", "[ARGS]")
        if marker == "[CALL_ID]":
            yield from self._hold_run(_CALL_ID)
            yield from self._expect("[ARGS]")
        yield from self._hold_blanks()
        yield from self._arguments(name)


class DeepSeekV31ToolParser(ToolParser):
    """For DeepSeek-V3.1. All calls are in one block.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """

    marker = "<｜tool▁calls▁begin｜>"
    second_marker = "<｜tool▁call▁begin｜>"
    ends: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    after_marker = (second_marker,)

    def _marked_call(self, marker: str) -> Steps[None]:
        tag = marker
        if marker == self.marker:
            yield from self._hold_blanks()
            tag = yield from self._expect(self.second_marker)
        while tag == self.second_marker:
            yield from self._hold_blanks()
            yield from self._block_call()
            yield from self._hold_blanks()
            yield from self._hold_literal("<｜tool▁call▁end｜>")
            yield from self._hold_blanks()
            tag = yield from self._expect(self.second_marker, "<｜tool▁calls▁end｜>")

    def _block_call(self) -> Steps[None]:
        name = yield from self._name(_DEEPSEEK_NAME)
        yield from self._expect("<｜tool▁sep｜>")
        yield from self._hold_blanks()
        yield from self._arguments(name)


class DeepSeekV3ToolParser(DeepSeekV31ToolParser):
    """For DeepSeek-V3 and R1. A call in the block begins with its type, and its arguments are a block of Markdown.

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
    """

    ends = (*DeepSeekV31ToolParser.ends, "```")

    def _block_call(self) -> Steps[None]:
        yield from self._expect("function<｜tool▁sep｜>")
        name = yield from self._name(_DEEPSEEK_NAME)
        yield from self._hold_blanks()
        yield from self._hold_fence()
        yield from self._arguments(name)
        yield from self._hold_blanks()
        if (yield from self._reader.comes("`")):
            yield from self._expect("```")
