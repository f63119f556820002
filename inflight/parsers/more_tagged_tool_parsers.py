"""Tool parsers for further families that write each argument of a call between tags: DeepSeek-V3.2 and V4, MiniCPM5, Hunyuan 3,
LongCat."""

from collections.abc import Collection
from typing import ClassVar

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.tagged_tool_parsers import Glm45ToolParser, KeyTags, TaggedToolParser
from inflight.parsers.text_reader import Steps

_CDATA, _END_OF_CDATA = "<![CDATA[", "]]>"


class DeepSeekV32ToolParser(TaggedToolParser):
    """For DeepSeek-V3.2. The tag before a value says whether the value is a string. Any other value is JSON.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
    """

    marker, end = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    second_marker = '<｜DSML｜invoke name="'
    after_marker = (second_marker,)
    before_name, after_name = second_marker, '">'
    before_key, after_value = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
    after_key = ('">',)
    after_call = "</｜DSML｜invoke>"
    _types: ClassVar = {'" string="true">': "string", '" string="false">': "", '">': None}
    _type: str | None = None

    def _expect_tags(self, *tags: str) -> Steps[None]:
        if tags != self.after_key:
            yield from super()._expect_tags(*tags)
            return
        self._type = self._types[(yield from self._expect(*self._types))]

    def _value(self, schema: ArgumentSchema, missing: Collection[str], key_tags: KeyTags) -> Steps[None]:
        if self._type is not None:
            schema = ArgumentSchema({"type": self._type} if self._type else {}, budget=self._budget)
        yield from super()._value(schema, missing, key_tags)


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """For DeepSeek-V4: the same as for V3.2, with another name of the outermost tags."""

    marker, end = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"


class MiniCpm5ToolParser(TaggedToolParser):
    """For MiniCPM5. A value with special characters is in a CDATA block.

    <function name="get_weather"><param name="city">Oslo</param><param name="note"><![CDATA[a < b]]></param></function>
    """

    marker = '<function name="'
    after_name = '">'
    before_key, after_key, after_value = '<param name="', ('">',), "</param>"
    after_call = "</function>"

    def _value(self, schema: ArgumentSchema, missing: Collection[str], key_tags: KeyTags) -> Steps[None]:
        if not (yield from self._reader.literal(_CDATA)):
            yield from super()._value(schema, missing, key_tags)
            return
        value = schema.held_value(self._writer.arguments)
        if not (yield from self._reader.until(value.write, _END_OF_CDATA)):
            value.end(is_cut=self._reader.is_cut)
            raise MalformedCallError
        value.end()
        yield from self._hold_literal(self.after_value)


class HyV3ToolParser(TaggedToolParser):
    """For Hunyuan 3.

    <tool_calls:opensource>
    <tool_call:opensource>get_weather<tool_sep:opensource>
    <arg_key:opensource>city</arg_key:opensource>
    <arg_value:opensource>Oslo</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>
    """

    marker, end = "<tool_calls:opensource>", "</tool_calls:opensource>"
    second_marker = "<tool_call:opensource>"
    after_marker = (second_marker,)
    before_name, after_name = second_marker, "<tool_sep:opensource>"
    before_key, after_value = "<arg_key:opensource>", "</arg_value:opensource>"
    after_key = ("</arg_key:opensource>", "<arg_value:opensource>")
    after_call = "</tool_call:opensource>"


class LongCatToolParser(Glm45ToolParser):
    """For LongCat-Flash: the tags of GLM-4.5, with names of their own.

    <longcat_tool_call>get_weather
    <longcat_arg_key>city</longcat_arg_key>
    <longcat_arg_value>Oslo</longcat_arg_value>
    </longcat_tool_call>
    """

    marker = "<longcat_tool_call>"
    before_key, after_value = "<longcat_arg_key>", "</longcat_arg_value>"
    after_key = ("</longcat_arg_key>", "<longcat_arg_value>")
    after_call = "</longcat_tool_call>"
