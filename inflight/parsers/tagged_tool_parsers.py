"""Tool parsers for the families that write each argument of a call between tags: Qwen3-Coder, Seed-OSS, GLM and MiniMax.

If the schema of an argument has the type string, or there is no schema, the argument is a string and is passed on as it
arrives. Any other argument is held until it ends (`HeldValue`). Values of Python then become JSON. Valid JSON is passed on
unchanged, and other text as a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.held_value import HeldValue
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser

_NAME = re.compile(r'[^<>"\r\n]+')
_PLAIN = re.compile(r"[^<\n]+")


class _TaggedToolParser(ToolParser):
    """Reads `marker`, then calls, then `end`. White space may stand between two tags, and next to a name or a key.

    Attributes:
        before_name, after_name: the tags around the name of a call. If there is no tag before the name, a single call follows
            `marker`, and `after_call` is the last tag.
        before_key, after_key, after_value: the tags around an argument.
        after_call: the tag behind the arguments.
        end: the tag behind the last call.
        has_line_breaks: whether one line break before an argument's value and one after it are markup.
    """

    before_name: ClassVar[str] = ""
    after_name: ClassVar[str] = ""
    before_key: ClassVar[str]
    after_key: ClassVar[tuple[str, ...]]
    after_value: ClassVar[str]
    after_call: ClassVar[str]
    end: ClassVar[str] = ""
    has_line_breaks: ClassVar[bool] = False

    def _marked_call(self) -> Steps[None]:
        yield from self._expect_tags(self.before_name)
        yield from self._tagged_call()
        while self.before_name:
            yield from self._hold_blanks()
            if (yield from self._expect(self.before_name, self.end)) == self.end:
                return
            yield from self._tagged_call()

    def _tagged_call(self) -> Steps[None]:
        """Read a call, from its name to `after_call`."""
        yield from self._hold_blanks()
        name = yield from self._name(_NAME)
        yield from self._expect_tags(self.after_name)
        yield from self._hold_blanks()
        tag = yield from self._expect(self.before_key, self.after_call)
        self._writer.start_call(name)
        properties = self._properties(name)
        opening = "{"
        while tag != self.after_call:
            key = (yield from self._hold_run(_NAME)).strip()
            yield from self._expect_tags(*self.after_key)
            self._writer.accept()
            self._writer.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from self._value(is_string=_is_string(properties.get(key)))
            yield from self._hold_blanks()
            tag = yield from self._expect(self.before_key, self.after_call)
        self._writer.accept()
        self._writer.arguments("{}" if opening == "{" else "}")

    def _expect_tags(self, *tags: str) -> Steps[None]:
        for tag in filter(None, tags):
            yield from self._hold_blanks()
            yield from self._expect(tag)

    def _value(self, *, is_string: bool) -> Steps[None]:
        """Read an argument up to its closing tag."""
        value = HeldValue(self._writer.arguments, is_string=is_string)
        ends = [self.after_value]
        if self.has_line_breaks:
            yield from self._hold_literal("\n")
            ends.append(f"\n{self.after_value}")
        while (yield from self._reader.peek()):
            if not (piece := (yield from self._reader.piece(_PLAIN, value.room))):
                if (yield from self._hold_literal(*ends)):
                    self._writer.accept()
                    value.end()
                    return
                piece = self._reader.take(1)
            value.write(piece)
        value.cut()
        raise MalformedCallError

    def _properties(self, name: str) -> Mapping[str, Any]:  # Any: JSON schemas
        """Returns name -> schema for the parameters of the tool `name`; empty if the request has no such tool."""
        for tool in self._tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and function.get("name") == name:
                parameters = function.get("parameters")
                properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
                return properties if isinstance(properties, Mapping) else {}
        return {}


class Qwen3CoderToolParser(_TaggedToolParser):
    """For Qwen3-Coder.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
    """

    marker, end = "<tool_call>", "</tool_call>"
    before_name, after_name = "<function=", ">"
    before_key, after_key, after_value = "<parameter=", (">",), "</parameter>"
    after_call = "</function>"
    has_line_breaks = True


class SeedOssToolParser(Qwen3CoderToolParser):
    """For Seed-OSS. Objects and lists are written as in Python.

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Paris</parameter>
    </function>
    </seed:tool_call>
    """

    marker, end = "<seed:tool_call>", "</seed:tool_call>"
    has_line_breaks = False


class Glm45ToolParser(_TaggedToolParser):
    """For GLM-4.5 and later. Since GLM-4.7 there are no line breaks.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
    """

    marker = "<tool_call>"
    before_key, after_key, after_value = "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"
    after_call = "</tool_call>"


class MiniMaxM2ToolParser(_TaggedToolParser):
    """For MiniMax-M2.

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>
    """

    marker, end = "<minimax:tool_call>", "</minimax:tool_call>"
    before_name, after_name = '<invoke name="', '">'
    before_key, after_key, after_value = '<parameter name="', ('">',), "</parameter>"
    after_call = "</invoke>"


def _is_string(schema: object) -> bool:
    return not isinstance(schema, Mapping) or schema.get("type") == "string"
