"""Tool parsers for the families that write a JSON list of calls, or a few JSON calls, between two tags of their own.

    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>

Each family is one class with its tags and its names of the keys. A list, one object, and objects one after another are read in
each of them. The tag at the end may be missing at the end of the text.
"""

import re
from collections.abc import Mapping
from typing import ClassVar

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.json_tool_parsers import Llama3JsonToolParser
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_TOO_MANY = re.compile(r"[}\] \t\r\n]+")


class _JsonBetweenTags(ToolParser):
    """
    Attributes:
        end: the tag after the last call; "" if there is none.
        more_markers: further texts with which calls begin.
    """

    end: ClassVar[str] = ""
    more_markers: ClassVar[tuple[str, ...]] = ()
    after_marker: ClassVar[tuple[str, ...]] = ("[", "{", "```")

    @property
    def markers(self) -> tuple[str, ...]:
        return (*super().markers, *self.more_markers)

    def _marked_call(self, marker: str) -> Steps[None]:
        yield from self._hold_blanks()
        yield from self._hold_fence()
        yield from self._calls()
        if self.end:
            yield from self._hold_run(_TOO_MANY)
            yield from self._hold_fence()
            yield from self._expect(self.end)

    def _calls(self) -> Steps[None]:
        """Read a list of calls, or calls one after another."""
        if (yield from self._hold_literal("[")):
            yield from self._list_of_calls()
            return
        yield from self._call()
        while True:
            self._writer.end_call()
            yield from self._hold_blanks()
            yield from self._hold_literal(",", ";")
            yield from self._hold_blanks()
            if not (yield from self._reader.comes("{")):
                return
            yield from self._call()


class JambaToolParser(_JsonBetweenTags):
    """For Jamba, Hunyuan, MiniMax-M1 and Apriel.

    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>
    """

    marker = "<tool_calls>"
    end = "</tool_calls>"
    ends = (end,)


class NemotronJsonToolParser(_JsonBetweenTags):
    """For Nemotron Nano v2.

    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>
    """

    marker = "<TOOLCALL>"
    end = "</TOOLCALL>"
    ends = (end,)


class NemotronMiniToolParser(_JsonBetweenTags):
    """For Nemotron-Mini, and other models with its tokenizer.

    <toolcall> {"name": "get_weather", "arguments": {"city": "Oslo"}} </toolcall>
    """

    marker = "<toolcall>"
    end = "</toolcall>"
    ends = (end,)


class GraniteToolParser(_JsonBetweenTags):
    """For Granite 3. There is no tag at the end. Granite 3.0 writes its tag without the vertical bars.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    """

    marker = "<|tool_call|>"
    second_marker = "<tool_call>"
    ends = ("<|tool_call|>",)


class Granite20bToolParser(_JsonBetweenTags):
    """For Granite 20B Function Calling.

    <function_call> {"name": "get_weather", "arguments": {"city": "Oslo"}} <function_call> {"name": "get_time", "arguments": {}}
    """

    marker = "<function_call>"
    ends = (marker,)


class Phi4MiniToolParser(_JsonBetweenTags):
    """For Phi-4-mini. It writes a word before the list, or two tags around it.

    functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>
    """

    marker = "<|tool_call|>"
    second_marker = "functools["
    ends = ("<|/tool_call|>",)

    def _marked_call(self, marker: str) -> Steps[None]:
        if marker == self.second_marker:
            yield from self._list_of_calls()
            return
        yield from super()._marked_call(marker)
        yield from self._hold_run(_TOO_MANY)
        yield from self._hold_literal("<|/tool_call|>")


class InternLmToolParser(_JsonBetweenTags):
    """For InternLM 2.5 and 3.

    <|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>
    """

    marker = "<|action_start|><|plugin|>"
    end = "<|action_end|>"
    more_markers = ("<|action_start|> <|plugin|>",)
    ends = (end,)


class GigaChat3ToolParser(_JsonBetweenTags):
    """For GigaChat 3. A call is a message of its own; since 3.1 it begins with a tag.

    <|message_sep|>\\n\\nfunction call<|role_sep|>\\n{"name": "get_weather", "arguments": {"city": "Oslo"}}
    <|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}
    """

    marker = "<|function_call|>"
    second_marker = "function call<|role_sep|>"
    more_markers = (f"<|message_sep|>\n\n{second_marker}",)
    ends = ("<|message_sep|>", "<|function_call|>")

    def _marked_call(self, marker: str) -> Steps[None]:
        yield from super()._marked_call(marker)
        yield from self._hold_literal("<|message_sep|>")


class CohereToolParser(_JsonBetweenTags):
    """For Command R7B, Command A and later models of Cohere.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}
    ]<|END_ACTION|>
    """

    marker = "<|START_ACTION|>"
    end = "<|END_ACTION|>"
    ends = (end,)
    keys: ClassVar[Mapping[str, str]] = {"tool_name": "name", "tool_call_id": "id"}


class CommandRToolParser(_JsonBetweenTags):
    """For Command R and R+. They write every answer as a list of actions; `directly-answer` says that no tool is needed.

    Action:
    ```json
    [{"tool_name": "get_weather", "parameters": {"city": "Oslo"}}]
    ```
    """

    marker = "Action:"
    ends = ("```",)
    keys = CohereToolParser.keys
    after_marker = ("```",)

    def _marked_call(self, marker: str) -> Steps[None]:
        yield from self._hold_blanks()
        if not (yield from self._reader.comes("```")):
            raise MalformedCallError
        yield from super()._marked_call(marker)
        yield from self._hold_run(_TOO_MANY)
        yield from self._hold_literal("```")


class ApertusToolParser(_JsonBetweenTags):
    """For Apertus. The name of the function is the key of its arguments.

    <|tools_prefix|>[{"get_weather": {"city": "Oslo"}}, {"get_time": {}}]<|tools_suffix|>
    """

    marker = "<|tools_prefix|>"
    end = "<|tools_suffix|>"
    ends = (end,)

    def _call(self, *, is_unmarked: bool = False) -> Steps[None]:
        yield from self._expect("{")
        yield from self._hold_blanks()
        name = yield from self._string()
        self._check_name(name, is_unmarked=is_unmarked)
        yield from self._hold_blanks()
        yield from self._expect(":")
        yield from self._hold_blanks()
        yield from self._arguments(name, num_braces=1)
        yield from self._hold_blanks()
        if not (yield from self._reader.comes(*self.ends)):
            yield from self._expect("}")


class XLamToolParser(_JsonBetweenTags):
    """For xLAM. A message is a list of calls, also as a block of Markdown, or behind one of two tags.

    [{"name": "get_weather", "arguments": {"city": "Oslo"}}]

    If a message begins with anything else, it has no calls. The first call must be one of the request's tools.
    """

    def run(self) -> Steps[None]:
        try:
            yield from self._hold_blanks()
            tag = yield from self._hold_literal("[TOOL_CALLS]", "<tool_call>")
            yield from self._hold_blanks()
            yield from self._hold_fence()
            while True:
                yield from self._calls()
                yield from self._hold_run(_TOO_MANY)
                yield from self._hold_literal("```")
                if tag == "<tool_call>":
                    yield from self._hold_literal("</tool_call>")
                self._writer.end_call()
                yield from self._hold_blanks()
                if not (yield from self._reader.comes("[")):
                    break
        except MalformedCallError:
            pass
        self._writer.reject()
        yield from self._reader.all(self._writer.content)

    def _check_name(self, name: str, *, is_unmarked: bool) -> None:
        super()._check_name(name, is_unmarked=is_unmarked)
        if not self._writer.num_tool_calls and name not in self._tool_names:
            raise MalformedCallError


class Llama4JsonToolParser(Llama3JsonToolParser):
    """For Llama 4, if it writes calls as Llama 3 does. Two tags may stand before them.

    <|python_start|><|python_end|>{"name": "get_weather", "parameters": {"city": "Oslo"}}
    """

    def run(self) -> Steps[None]:
        yield from self._hold_blanks()
        yield from self._hold_literal("<|python_start|>")
        yield from self._hold_literal("<|python_end|>")
        yield from super().run()
