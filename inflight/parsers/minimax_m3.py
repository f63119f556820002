"""`MiniMaxM3ToolParser`: reads the calls of MiniMax-M3. An argument stands in a tag with its name, and objects and lists have
tags, too.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="book">]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[<days>]<]minimax[>[<item>1
    ]<]minimax[>[</item>]<]minimax[>[<item>2]<]minimax[>[</item>]<]minimax[>[</days>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

A special token stands before each tag, so tags without it are text. An object or a list may also be written as JSON. If the
tags in a value do not fit together, the value is a string: the text as the model wrote it.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.buffered_value import BufferedValue
from inflight.parsers.event_writer import MalformedCallError
from inflight.parsers.tagged_tool_parsers import KeyTags, TaggedToolParser
from inflight.parsers.text_reader import Steps

_BEFORE_TAG = "]<]minimax[>["
_TAG = re.compile(re.escape(_BEFORE_TAG) + r"<(/?)([^<>]+)>")
_NAME = re.compile(r"[^<>\]]+")
_ITEM = "item"
_MAX_DEPTH = 64  # of tags inside each other


class MiniMaxM3ToolParser(TaggedToolParser):
    """For MiniMax-M3."""

    marker = f"{_BEFORE_TAG}<tool_call>"
    end = f"{_BEFORE_TAG}</tool_call>"
    second_marker = f'{_BEFORE_TAG}<invoke name="'
    after_marker = (second_marker,)
    before_name = second_marker
    after_name = '">'
    before_key = f"{_BEFORE_TAG}<"
    after_key = (">",)
    after_value = f"{_BEFORE_TAG}</{{key}}>"
    after_call = f"{_BEFORE_TAG}</invoke>"
    no_tag = re.compile(r"[^\]\n]+")

    def _value(
        self, schema: ArgumentSchema, missing: Collection[str], key_tags: KeyTags, after_value: str
    ) -> Steps[None]:
        types = schema.types
        may_have_tags = bool(types & {"object", "array"})
        if may_have_tags and ("string" not in types or (yield from self._comes_opening_tag())):
            yield from self._nested_value(schema, after_value)
        else:
            yield from super()._value(schema, missing, key_tags, after_value)

    def _comes_opening_tag(self) -> Steps[bool]:
        if (yield from self._reader.follows({f"{_BEFORE_TAG}</": None})):
            return False
        return (yield from self._reader.follows({f"{_BEFORE_TAG}<": None}))

    def _nested_value(self, schema: ArgumentSchema, after_value: str) -> Steps[None]:
        """Read an argument with tags in it up to its closing tag. If that is missing, the argument ends with the call."""
        value = BufferedValue(self._writer.arguments, lambda text: _as_json(text, schema))
        open_names: list[str] = []
        num_open = Counter[str]()  # by name
        own_name = after_value[len(_BEFORE_TAG) + 2 : -1]
        while (yield from self._reader.peek()):
            if piece := (yield from self._reader.piece(self.no_tag)):
                value.write(piece)
                continue
            is_own_end = not num_open[own_name] and (yield from self._reader.literal(after_value))
            if is_own_end or (yield from self._reader.comes(self.after_call, self.end, self.second_marker)):
                value.end()
                return
            closing = yield from self._reader.literal(f"{_BEFORE_TAG}</")
            text = closing or (yield from self._reader.literal(f"{_BEFORE_TAG}<")) or self._reader.take(1)
            value.write(text)
            if len(text) > 1:
                name = yield from self._name_of_tag(value)
                if not closing:
                    open_names.append(name)
                    num_open[name] += 1
                is_inner_end = closing and num_open[name] > 0
                while is_inner_end:  # and the end of the tags in it that have no closing tag
                    num_open[open_names[-1]] -= 1
                    is_inner_end = open_names.pop() != name
        value.end(is_cut=(yield from self._reader.is_at_cut()))
        raise MalformedCallError

    def _name_of_tag(self, value: BufferedValue) -> Steps[str]:
        pieces: list[str] = []
        while piece := (yield from self._reader.piece(_NAME)):
            value.write(piece)
            pieces.append(piece)
        return "".join(pieces)


@dataclass(frozen=True, slots=True)
class _Element:
    """A tag, what is in it, and its closing tag. If it has other elements, its text is white space."""

    name: str
    text: str
    elements: Sequence["_Element"]


def _as_json(text: str, schema: ArgumentSchema) -> str:
    """The JSON of a value: of the elements in it, or of its text."""
    whole = _element(text)
    written = None if whole is None else _written(whole, schema)
    return json.dumps(text, ensure_ascii=False) if written is None else written


def _element(text: str) -> _Element | None:
    """The text as the content of one element; None if its tags do not fit together."""
    names = [""]
    texts = [""]
    inner = [list[_Element]()]
    position = 0
    for tag in _TAG.finditer(text):
        texts[-1] += text[position : tag.start()]
        position = tag.end()
        if not tag[1]:
            if len(names) > _MAX_DEPTH:
                return None
            names.append(tag[2])
            texts.append("")
            inner.append([])
            continue
        element = _Element(names.pop(), texts.pop(), inner.pop())
        if not names or element.name != tag[2] or (element.elements and element.text.strip()):
            return None
        inner[-1].append(element)
    whole = _Element(names[0], texts[0] + text[position:], inner[0])
    is_whole = len(names) == 1 and not (whole.elements and whole.text.strip())
    return whole if is_whole and _BEFORE_TAG not in whole.text else None


def _written(element: _Element, schema: ArgumentSchema) -> str | None:
    """The JSON of an element; None if two elements of an object have one name."""
    types = schema.types
    elements = element.elements
    if not elements:
        return _written_text(element.text, schema)
    names = [each.name for each in elements]
    is_list = all(name == _ITEM for name in names) and ("array" in types or "object" not in types)
    if not is_list and len(set(names)) < len(names):
        return None
    values = [_written(each, schema.item() if is_list else schema.argument(each.name)) for each in elements]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if is_list:
        return f"[{', '.join(known)}]"
    keys = [json.dumps(name, ensure_ascii=False) for name in names]
    entries = (f"{key}: {value}" for key, value in zip(keys, known, strict=True))
    return f"{{{', '.join(entries)}}}"


def _written_text(text: str, schema: ArgumentSchema) -> str:
    """The JSON of an element without others in it: an empty list or object has no text."""
    if not text.strip() and "string" not in schema.types:
        for kind, empty in (("array", "[]"), ("object", "{}")):
            if kind in schema.types:
                return empty
    if schema.node is not None:
        return schema.read_text(text)
    return schema.read_word(text)
