"""Tool parsers for the families that write each argument of a call between tags: Qwen3-Coder, Seed-OSS, GLM and MiniMax.

If the tool's schema allows a string (`ArgumentSchema`), or there is no schema, the argument is a string and is passed on as it
arrives. Any other argument is buffered until it ends (`BufferedValue`). Values of Python then become JSON. Valid JSON is passed
on unchanged, and other text as a string.

Models leave tags out, and they write such tags inside values. So every tag may be missing, except for those around a name and a
key. A closing tag ends a value only if it is followed by a tag that may come next, or by the end of the text.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.event_writer import EventWriter, MalformedCallError
from inflight.parsers.text_reader import Following, Literals, Steps, TextReader
from inflight.parsers.tool_parser import ToolParser

_NAME = re.compile(r'[^<>"\r\n]+')


class KeyTags(NamedTuple):
    """The texts with which the arguments of a tool begin, such as `<parameter=city>`. `keys`: such a text -> the argument."""

    keys: Mapping[str, str]
    literals: Literals


class TaggedToolParser(ToolParser):
    """Reads `marker`, then calls, then `end`. White space may stand between two tags, and next to a name or a key.

    Attributes:
        before_name, after_name: the tags around the name of a call. If there is no tag before the name, a single call follows
            `marker`, and `after_call` is the last tag.
        before_key, after_key, after_value: the tags around an argument. In `after_value`, {key} is the name of the argument.
        other_names, other_keys: what models write in place of `before_name` and `before_key`.
        after_call: the tag after the arguments.
        end: the tag after the last call.
        no_tag: a run of characters with which no tag begins.
        has_line_breaks: whether one line break before an argument's value and one after it are markup.
    """

    before_name: ClassVar[str] = ""
    after_name: ClassVar[str] = ""
    other_names: ClassVar[tuple[str, ...]] = ()
    before_key: ClassVar[str]
    other_keys: ClassVar[tuple[str, ...]] = ()
    after_key: ClassVar[tuple[str, ...]]
    after_value: ClassVar[str]
    after_call: ClassVar[str]
    end: ClassVar[str] = ""
    no_tag: ClassVar[re.Pattern[str]] = re.compile(r"[^<\n]+")
    has_line_breaks: ClassVar[bool] = False

    def __init__(
        self, reader: TextReader, writer: EventWriter, tools: Sequence[Mapping[str, Any]]
    ) -> None:  # Any: JSON
        super().__init__(reader, writer, tools)
        self._key_tags: dict[str, KeyTags] = {}  # by tool

    def _marked_call(self, marker: str) -> Steps[None]:
        is_marked = marker == self.marker
        if is_marked and self.before_name:
            yield from self._hold_blanks()
            yield from self._expect(*self._names)
        elif self._before == ">":  # the tag is inside other markup
            raise MalformedCallError
        yield from self._tagged_call(is_marked=is_marked)
        while self.before_name:
            yield from self._hold_blanks()
            if (yield from self._expect(*self._names, self.end)) == self.end:
                return
            yield from self._tagged_call(is_marked=True)

    def _tagged_call(self, *, is_marked: bool) -> Steps[None]:
        """Read a call, from its name to `after_call`."""
        yield from self._hold_blanks()
        quote = yield from self._hold_literal(*self._quotes)
        name = yield from self._name(_NAME)
        name = name.removesuffix(quote) if quote else name
        yield from self._hold_literal(*filter(None, [quote]))
        if not is_marked and name not in self._tool_names:
            raise MalformedCallError
        yield from self._expect_tags(self.after_name)
        yield from self._hold_blanks()
        if (yield from self._arguments_in_one(name)):
            return
        tag = ""
        if not (yield from self._reader.comes(*self._outer)):
            tag = (yield from self._key_or_end()) or (yield from self._expect(*self._keys, self.after_call))
        self._writer.start_call(name)
        schema = self._schema_of(name)
        missing = schema.names()
        key_tags = self._key_tags_of(name, missing)
        opening = "{"
        try:
            while tag in self._keys:
                quote = yield from self._hold_literal(*self._quotes)
                key = (yield from self._hold_run(_NAME)).strip()
                key = self._unescaped(key.removesuffix(quote) if quote else key)
                yield from self._hold_literal(*filter(None, [quote]))
                yield from self._expect_tags(*self.after_key)
                self._writer.accept()
                self._writer.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
                opening = ", "
                missing.discard(key)
                yield from self._value(schema.argument(key), missing, key_tags, self.after_value.replace("{key}", key))
                tag = yield from self._next_tag()
        except MalformedCallError:
            if not (yield from self._reader.is_at_cut()):
                self._writer.arguments("{}" if opening == "{" else "}")
            raise
        self._writer.accept()
        self._writer.arguments("{}" if opening == "{" else "}")

    def _key_tags_of(self, tool: str, keys: Collection[str]) -> KeyTags:
        if tool not in self._key_tags:
            around = [(tag + quote, quote + self.after_key[0]) for tag in self._keys for quote in ("", *self._quotes)]
            texts = {f"{before}{key}{behind}": key for key in keys for before, behind in around}
            self._key_tags[tool] = KeyTags(texts, Literals(texts))
        return self._key_tags[tool]

    def _expect_tags(self, *tags: str) -> Steps[None]:
        for tag in filter(None, tags):
            yield from self._hold_blanks()
            yield from self._expect(tag)

    def _arguments_in_one(self, name: str) -> Steps[bool]:
        """Read all arguments of a call and its closing tag, if they come as one text. Then the call has started."""
        yield from ()
        return False

    @staticmethod
    def _unescaped(key: str) -> str:
        """The name of an argument, of the text in its tag."""
        return key

    @property
    def _outer(self) -> tuple[str, ...]:
        """The tags outside a call. If one of them comes in a call, the call has ended without its closing tag."""
        return tuple(filter(None, (self.end, *self._names, self.marker)))

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.other_names, self.before_name)

    @property
    def _keys(self) -> tuple[str, ...]:
        return (*self.other_keys, self.before_key)

    @property
    def _quotes(self) -> tuple[str, ...]:
        """Quotes that may stand around a name or a key, although the format has none there."""
        return ('"', "'") if self.other_keys else ()

    def _next_tag(self) -> Steps[str]:
        """Hold the tag of the next argument or the closing tag of the call, and return it; "" if the closing tag is missing.
        Text before this tag is left out."""
        tags = (*self._keys, self.after_call)
        while not (yield from self._reader.comes(*self._outer)):
            if tag := (yield from self._key_or_end()):
                return tag
            if not (yield from self._reader.peek()):
                raise MalformedCallError
            if (rest := self._reader.take_cut(*tags, *self._outer)) is not None:
                self._writer.hold(rest)
                self._writer.cut()
            elif not (yield from self._hold_run(self.no_tag)):
                self._writer.hold(self._reader.take(1))
        return ""

    def _key_or_end(self) -> Steps[str]:
        """Hold the closing tag of the call or the tag before a key, whichever comes next; "" if none comes. The closing tag may
        begin like the other."""
        return (yield from self._hold_literal(self.after_call)) or (yield from self._hold_literal(*self._keys))

    def _value(
        self, schema: ArgumentSchema, missing: Collection[str], key_tags: KeyTags, after_value: str
    ) -> Steps[None]:
        """Read an argument up to its closing tag. A closing tag may also be a part of the value, so it counts only if it is
        followed by something that may come after the value.

        Args:
            missing: the arguments that have not come yet. The closing tag may be missing before one of them.
            key_tags: of all arguments.
            after_value: the closing tag of this argument.
        """
        value = schema.buffered_value(self._writer.arguments)
        outer = dict.fromkeys(self._outer)
        ends: dict[str, Following | None] = {
            self.end or self.after_call: {self.marker: None},
            self.after_call: outer,
            after_value: {**dict.fromkeys(self._keys), self.after_call: outer if self.end else None, **outer},
        }
        if not schema.types & {"string", "object", "array"}:  # a number, a boolean or null contains no tag
            ends[after_value] = None
        if self.has_line_breaks:
            yield from self._reader.literal("\n")
        while (yield from self._reader.peek()):
            if piece := (yield from self._reader.piece(self.no_tag)):
                value.write(piece)
                continue
            newline = "\n" if self.has_line_breaks and (yield from self._reader.comes("\n<")) else ""
            key_tag = yield from self._reader.comes_of(key_tags.literals, len(newline))
            if key_tag and key_tags.keys[key_tag] in missing:
                self._reader.take(len(newline))
                value.end()
                return
            tag = (yield from self._reader.comes(*(newline + end for end in ends))).removeprefix(newline)
            if tag and (yield from self._reader.follows({tag: ends[tag]})):
                self._reader.take(len(newline) + (len(tag) if tag == after_value else 0))
                value.end()
                return
            value.write(self._reader.take(1))
        value.end(is_cut=(yield from self._reader.is_at_cut()))
        raise MalformedCallError


class Qwen3CoderToolParser(TaggedToolParser):
    """For Qwen3-Coder.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
    """

    marker = "<tool_call>"
    end = "</tool_call>"
    second_marker = "<function="
    after_marker = (second_marker, "<function name=")
    before_name = second_marker
    after_name = ">"
    other_names = ("<function name=",)
    other_keys = ("<parameter name=",)
    before_key = "<parameter="
    after_key = (">",)
    after_value = "</parameter>"
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

    marker = "<seed:tool_call>"
    end = "</seed:tool_call>"
    has_line_breaks = False


class Glm45ToolParser(TaggedToolParser):
    """For GLM-4.5 and later. Since GLM-4.7 there are no line breaks.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
    """

    marker = "<tool_call>"
    before_key = "<arg_key>"
    after_key = ("</arg_key>", "<arg_value>")
    after_value = "</arg_value>"
    after_call = "</tool_call>"


class MiniMaxM2ToolParser(TaggedToolParser):
    """For MiniMax-M2.

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>
    """

    marker = "<minimax:tool_call>"
    end = "</minimax:tool_call>"
    second_marker = '<invoke name="'
    after_marker = (second_marker,)
    before_name = second_marker
    after_name = '">'
    before_key = '<parameter name="'
    after_key = ('">',)
    after_value = "</parameter>"
    after_call = "</invoke>"
