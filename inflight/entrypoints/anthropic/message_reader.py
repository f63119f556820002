"""`MessageReader`: makes the messages of a chat from Anthropic's messages and their blocks."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from inflight.entrypoints.anthropic.blocks import (
    BlocksSource,
    CompactionBlock,
    ContentBlock,
    DocumentBlock,
    OtherBlock,
    PlainSource,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from inflight.entrypoints.anthropic.protocol import InputMessage
from inflight.entrypoints.fields.content_parts import check_medium, text_instead
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.messages import MAX_TOOLS, chat_call, chat_message, chat_tool
from inflight.entrypoints.fields.strict_model import StrictModel, without_indices
from inflight.entrypoints.http.chat_request import Json

_BILLING = "x-anthropic-billing-header:"
_OF_ASSISTANT = (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)


class MessageReader:
    """
    Attributes:
        loaded: the deferred tools whose definitions the messages so far have; name -> definition.
        left_out: the names of the blocks that the model does not see, for the answer's header.
    """

    def __init__(self, messages: Sequence[InputMessage], listed: Iterable[str], deferred: Mapping[str, Json]) -> None:
        """
        Args:
            listed: the names of the tools that the template lists.
            deferred: the tools that it does not list until a block names them.
        """
        self.loaded: dict[str, Json] = {}
        self.left_out: list[str] = []
        self._messages = messages
        self._listed = frozenset(listed)
        self._deferred = deferred
        self._calls_left_out = frozenset(_calls_left_out(messages))
        # the last message is left out: it may be the beginning of the answer that is asked for
        before = enumerate(messages[:-1], 1)
        self._num_answered = max((number for number, message in before if message.role == "assistant"), default=0)

    def system_text(self, system: str | list[ContentBlock] | None) -> str:
        if isinstance(system, str):
            return _without_billing(system)
        is_asked = self._num_answered == 0
        texts = [self._text(block, f"system[{i}]", is_asked=is_asked) for i, block in enumerate(system or ())]
        return "\n".join(filter(None, (_without_billing(text or "") for text in texts)))

    def read(self) -> list[Json]:
        """
        Raises:
            FieldError: the client asks about a medium, such as an image.
        """
        found: list[Json] = []
        for i, message in enumerate(self._messages):
            if isinstance(message.content, str):
                found.append(chat_message(message.role, message.content))
                continue
            blocks = [(block, f"messages[{i}].content[{k}]") for k, block in enumerate(message.content)]
            if message.role == "assistant":
                found += self._answers(blocks)
            else:
                found += self._question(message.role, blocks, is_asked=i >= self._num_answered)
        return found

    def _question(self, role: str, blocks: list[tuple[ContentBlock, str]], *, is_asked: bool) -> list[Json]:
        """Chat templates expect the results right behind the calls, so they come before the text of the same message."""
        results = self._results(blocks)
        others = [(block, where) for block, where in blocks if not isinstance(block, ToolResultBlock)]
        texts = self._texts(others, is_asked=is_asked)
        if texts or not results:
            return [*results, chat_message(role, "\n".join(texts))]
        return results

    def _answers(self, blocks: list[tuple[ContentBlock, str]]) -> list[Json]:
        """Some programs write results between the blocks of the assistant. Each result ends a message."""
        found: list[Json] = []
        for is_result, group in groupby(blocks, lambda pair: isinstance(pair[0], ToolResultBlock)):
            together = list(group)
            found += self._results(together) if is_result else [self._answer(together)]
        return found or [chat_message("assistant", "")]

    def _answer(self, blocks: list[tuple[ContentBlock, str]]) -> Json:
        own = [block for block, _ in blocks if isinstance(block, _OF_ASSISTANT)]
        texts = self._texts([pair for pair in blocks if not isinstance(pair[0], _OF_ASSISTANT)], is_asked=False)
        thoughts = [block.thinking for block in own if isinstance(block, ThinkingBlock) and block.thinking]
        calls = [chat_call(block.id, block.name, block.input) for block in own if isinstance(block, ToolUseBlock)]
        if len(calls) > MAX_TOOLS:
            raise FieldError("messages", f"messages: too many tool_calls: {too_many(MAX_TOOLS, len(calls))}")
        return chat_message(
            "assistant",
            "\n".join(texts) if texts or not calls else None,
            reasoning_content="\n\n".join(thoughts) or None,
            tool_calls=calls,
        )

    def _results(self, blocks: Iterable[tuple[ContentBlock, str]]) -> list[Json]:
        found = []
        for block, where in blocks:
            if not isinstance(block, ToolResultBlock):
                continue
            if block.tool_use_id in self._calls_left_out:
                self._leave_out(block, where)
                continue
            text = block.content or ""
            if not isinstance(text, str):
                text = "\n".join(self._inner(text, f"{where}.content", is_asked=False))
            text = f"Error: {text}" if block.is_error else text
            found.append(chat_message("tool", text, tool_call_id=block.tool_use_id))
        return found

    def _texts(self, blocks: Sequence[tuple[StrictModel, str]], *, is_asked: bool) -> list[str]:
        texts = [self._text(block, where, is_asked=is_asked) for block, where in blocks]
        return [text for text in texts if text is not None]

    def _inner(self, blocks: Sequence[StrictModel], where: str, *, is_asked: bool) -> list[str]:
        return self._texts([(block, f"{where}[{i}]") for i, block in enumerate(blocks)], is_asked=is_asked)

    def _text(self, block: StrictModel, where: str, *, is_asked: bool) -> str | None:
        """What the model reads of a block. None if the block is left out."""
        match block:
            case TextBlock():
                return block.text
            case CompactionBlock():
                return block.content
            case DocumentBlock():
                texts = self._document(block.source, f"{where}.source", is_asked=is_asked)
                return "\n".join(filter(None, (block.title, block.context, *texts)))
            case SearchResultBlock():
                texts = self._inner(block.content, f"{where}.content", is_asked=is_asked)
                return "\n".join(filter(None, (block.title, block.source, *texts)))
            case ToolReferenceBlock():
                return self._definition(block.tool_name)
            case ToolAdditionBlock() if (text := self._addition(block)) is not None:
                return text
            case OtherBlock() if text_instead(block.type):
                if is_asked:
                    check_medium(block.type, f"{where}.type")
                self._leave_out(block, where)
                return text_instead(block.type)
            case _:
                self._leave_out(block, where)
                return None

    def _document(self, source: PlainSource | BlocksSource, where: str, *, is_asked: bool) -> list[str]:
        if isinstance(source, PlainSource):
            return [source.data]
        if isinstance(source.content, str):
            return [source.content]
        return self._inner(source.content, f"{where}.content", is_asked=is_asked)

    def _leave_out(self, block: Any, where: str) -> None:  # Any: one of the blocks, which all have a type
        place, _, _ = without_indices(where).rpartition("[]")
        self.left_out.append(f"{place}[] ({block.type})")

    def _definition(self, name: str) -> str:
        """The definition of a deferred tool in the form in which most templates list tools. Other tools are only named."""
        tool = self._deferred.get(name)
        return name if tool is None else self._load(tool)

    def _addition(self, block: ToolAdditionBlock) -> str | None:
        added = block.tool
        name = added.name or added.tool_name
        if added.definition is not None:
            if not added.definition.is_own:
                return None
            return self._load(tool_of(added.definition))
        if name is None or added.type != "tool_reference":
            return None
        return self._definition(name)

    def _load(self, tool: Json) -> str:
        name = tool["function"]["name"]
        if name not in self._listed:
            self.loaded[name] = tool
        return json.dumps(tool, ensure_ascii=False)


def tool_of(tool: ToolDefinition) -> Json:
    strict = True if tool.strict else None
    return chat_tool(tool.name, description=tool.description, parameters=tool.input_schema, strict=strict)


def too_many(most: int, number: int) -> str:
    return f"List should have at most {most} items after validation, not {number}"


def _calls_left_out(messages: Sequence[InputMessage]) -> Iterator[str]:
    """The ids of the calls that the model does not see, so that their results are left out, too."""
    blocks = [
        (message.role, block)
        for message in messages
        if not isinstance(message.content, str)
        for block in message.content
    ]
    kept = {block.id for role, block in blocks if isinstance(block, ToolUseBlock) and role == "assistant"}
    for _, block in blocks:
        if isinstance(block, ToolUseBlock | OtherBlock) and isinstance(block.id, str) and block.id not in kept:
            yield block.id


def _without_billing(text: str) -> str:
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")
