"""Tool parsers for further families that write each argument of a call between tags: DeepSeek-V3.2 and V4, MiniCPM5, Hunyuan 3,
LongCat, ZAYA and Solar Open 2."""

from collections.abc import Collection
from typing import ClassVar

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.tagged_tool_parsers import Glm45ToolParser, KeyTags, Qwen3CoderToolParser, TaggedToolParser
from inflight.parsers.text_reader import Steps

_CDATA = "<![CDATA["
_END_OF_CDATA = "]]>"


class DeepSeekV32ToolParser(TaggedToolParser):
    """For DeepSeek-V3.2. The tag before a value says whether the value is a string. Any other value is JSON.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
    """

    marker = "<｜DSML｜function_calls>"
    end = "</｜DSML｜function_calls>"
    second_marker = '<｜DSML｜invoke name="'
    after_marker = (second_marker,)
    before_name = second_marker
    after_name = '">'
    before_key = '<｜DSML｜parameter name="'
    after_value = "</｜DSML｜parameter>"
    after_key = ('">',)
    after_call = "</｜DSML｜invoke>"
    _types: ClassVar = {'" string="true">': "string", '" string="false">': "", '">': None}
    _type: str | None = None

    def _expect_tags(self, *tags: str) -> Steps[None]:
        if tags != self.after_key:
            yield from super()._expect_tags(*tags)
            return
        self._type = self._types[(yield from self._expect(*self._types))]

    def _value(
        self, schema: ArgumentSchema, missing: Collection[str], key_tags: KeyTags, after_value: str
    ) -> Steps[None]:
        if self._type is not None:
            schema = ArgumentSchema({"type": self._type} if self._type else {}, budget=self._budget)
        yield from super()._value(schema, missing, key_tags, after_value)


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """For DeepSeek-V4: the same as for V3.2, with another name of the outermost tags."""

    marker = "<｜DSML｜tool_calls>"
    end = "</｜DSML｜tool_calls>"


class MiniCpm5ToolParser(TaggedToolParser):
    """For MiniCPM5. A value with special characters is in a CDATA block.

    <function name="get_weather"><param name="city">Oslo</param><param name="note"><![CDATA[a < b]]></param></function>
    """

    marker = '<function name="'
    after_name = '">'
    before_key = '<param name="'
    after_key = ('">',)
    after_value = "</param>"
    after_call = "</function>"

    def _value(
        self, schema: ArgumentSchema, missing: Collection[str], key_tags: KeyTags, after_value: str
    ) -> Steps[None]:
        if not (yield from self._reader.literal(_CDATA)):
            yield from super()._value(schema, missing, key_tags, after_value)
            return
        value = schema.buffered_value(self._writer.arguments)
        if not (yield from self._reader.until(value.write, _END_OF_CDATA)):
            value.end(is_cut=self._reader.is_cut)
            raise MalformedCallError
        value.end()
        yield from self._hold_literal(after_value)


class HyV3ToolParser(TaggedToolParser):
    """For Hunyuan 3.

    <tool_calls:opensource>
    <tool_call:opensource>get_weather<tool_sep:opensource>
    <arg_key:opensource>city</arg_key:opensource>
    <arg_value:opensource>Oslo</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>
    """

    marker = "<tool_calls:opensource>"
    end = "</tool_calls:opensource>"
    second_marker = "<tool_call:opensource>"
    after_marker = (second_marker,)
    before_name = second_marker
    after_name = "<tool_sep:opensource>"
    before_key = "<arg_key:opensource>"
    after_value = "</arg_value:opensource>"
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
    before_key = "<longcat_arg_key>"
    after_value = "</longcat_arg_value>"
    after_key = ("</longcat_arg_key>", "<longcat_arg_value>")
    after_call = "</longcat_tool_call>"


class ZayaToolParser(Qwen3CoderToolParser):
    """For ZAYA: the tags of Qwen3-Coder, with an outermost tag of its own.

    <zyphra_tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </zyphra_tool_call>
    """

    marker = "<zyphra_tool_call>"
    end = "</zyphra_tool_call>"


class SolarOpen2ToolParser(TaggedToolParser):
    """For Solar Open 2.

    <|tool_call:start|>get_weather
    <|tool_arg:start|>city<|tool_arg:value|>Oslo<|tool_arg:end|>
    <|tool_call:end|>
    """

    marker = "<|tool_call:start|>"
    before_key = "<|tool_arg:start|>"
    after_key = ("<|tool_arg:value|>",)
    after_value = "<|tool_arg:end|>"
    after_call = "<|tool_call:end|>"
