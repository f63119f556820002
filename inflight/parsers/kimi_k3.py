"""`KimiK3ToolParser`: reads the calls of Kimi K3. Each tag is a word between two special tokens, and says the type of a value.

    <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>
    <|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

All arguments together may also be one text of JSON, between <|open|>json type="object"<|sep|> and <|close|>json<|sep|>.
"""

import re
from collections.abc import Collection

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.tagged_tool_parsers import KeyTags, TaggedToolParser
from inflight.parsers.text_reader import Steps

_IN_TAG = re.compile(r"[^<\n]+")
_TYPE = re.compile(r'\btype\s*=\s*"?([a-z]+)')
_BEFORE_JSON = "<|open|>json"
_AFTER_JSON = "<|close|>json<|sep|>"
_END_OF_TAG = "<|sep|>"


class KimiK3ToolParser(TaggedToolParser):
    """For Kimi K3."""

    marker = "<|open|>tools<|sep|>"
    end = "<|close|>tools<|sep|>"
    second_marker = '<|open|>call tool="'
    after_marker = (second_marker,)
    before_name = second_marker
    after_name = '"'
    before_key = '<|open|>argument key="'
    after_key = ('"',)
    after_value = "<|close|>argument<|sep|>"
    after_call = "<|close|>call<|sep|>"
    ends = (_AFTER_JSON, after_call, end)
    _type = ""  # of the argument that is read

    @staticmethod
    def _unescaped(key: str) -> str:
        return key.replace("&quot;", '"').replace("&amp;", "&")

    def _expect_tags(self, *tags: str) -> Steps[None]:
        """Read the quote behind a name or a key, and the rest of its tag."""
        yield from super()._expect_tags(*tags)
        rest = yield from self._hold_run(_IN_TAG)
        yield from self._expect(_END_OF_TAG)
        found = _TYPE.search(rest)
        self._type = found[1] if found else ""

    def _value(
        self, schema: ArgumentSchema, missing: Collection[str], key_tags: KeyTags, after_value: str
    ) -> Steps[None]:
        if self._type:  # "number" is also written for an integer
            node = {"type": "string"} if self._type == "string" else {}
            schema = ArgumentSchema(node, budget=self._budget)
        yield from super()._value(schema, missing, key_tags, after_value)

    def _arguments_in_one(self, name: str) -> Steps[bool]:
        if not (yield from self._hold_literal(_BEFORE_JSON)):
            return False
        yield from self._hold_run(_IN_TAG)
        yield from self._expect(_END_OF_TAG)
        yield from self._hold_blanks()
        if (yield from self._reader.comes(_AFTER_JSON)):
            raise MalformedCallError
        yield from self._arguments(name)
        yield from self._hold_blanks()
        yield from self._hold_literal(_AFTER_JSON)
        yield from self._hold_blanks()
        if not (yield from self._reader.comes(*self._outer)):
            yield from self._expect(self.after_call)
        self._writer.accept()
        return True
