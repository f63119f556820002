"""`MessageReader`: makes the messages of a chat from Anthropic's messages and their blocks."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from inflight.entrypoints.anthropic.blocks import (
    Base64Source,
    BlocksSource,
    CompactionBlock,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
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
from inflight.entrypoints.fields.content_parts import TextPart, check_medium, text_instead
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import PlacedImage, RequestImages
from inflight.entrypoints.fields.messages import MAX_TOOLS, chat_call, chat_message, chat_tool
from inflight.entrypoints.fields.strict_model import StrictModel, without_indices
from inflight.entrypoints.http.chat_request import Json

_BILLING = "x-anthropic-billing-header:"
Piece = str | PlacedImage  # what the model reads of a block
_OF_ASSISTANT = (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)


class MessageReader:
    """
    Attributes:
        loaded: the deferred tools whose definitions the messages so far have; name -> definition.
        left_out: the names of the blocks that the model does not see, for the answer's header.
        places: for each message that was read the field of the request that has it.
    """

    def __init__(
        self,
        messages: Sequence[InputMessage],
        listed: Iterable[str],
        deferred: Mapping[str, Json],
        images: RequestImages,
    ) -> None:
        """
        Args:
            images: gets the images, if the model takes them.
            listed: the names of the tools that the template lists.
            deferred: the tools that it does not list until a block names them.
        """
        self.loaded: dict[str, Json] = {}
        self.left_out: list[str] = []
        self.places: list[str] = []
        self._messages = messages
        self._listed = frozenset(listed)
        self._deferred = deferred
        self._images = images
        self._calls_left_out = frozenset(_calls_left_out(messages))
        # the last message is left out: it may be the beginning of the answer that is asked for
        before = enumerate(messages[:-1], 1)
        self._num_answered = max((number for number, message in before if message.role == "assistant"), default=0)

    def system_text(self, system: str | list[ContentBlock] | None) -> str:
        if isinstance(system, str):
            return _without_billing(system)
        is_asked = self._num_answered == 0
        texts = []
        for i, block in enumerate(system or ()):
            if isinstance(block, ImageBlock):  # as in Anthropic's API, which takes text only here
                if is_asked and self._images.are_read:
                    problem = "the system text takes no images; put the image into a message of the user"
                    raise FieldError(f"system[{i}].type", f"system[{i}].type: {problem}")
                texts.append(self._text_instead(block, f"system[{i}]", is_asked=is_asked))
            else:
                texts += [
                    each for each in self._pieces(block, f"system[{i}]", is_asked=is_asked) if isinstance(each, str)
                ]
        return "\n".join(filter(None, map(_without_billing, texts)))

    def read(self) -> list[Json]:
        """
        Raises:
            FieldError: the client asks about a medium that the model cannot read.
        """
        found: list[Json] = []
        for i, message in enumerate(self._messages):
            made = self._read_message(message, f"messages[{i}]", is_asked=i >= self._num_answered)
            found += made
            self.places += [f"messages[{i}]"] * len(made)
        return found

    def _read_message(self, message: InputMessage, place: str, *, is_asked: bool) -> list[Json]:
        if isinstance(message.content, str):
            return [chat_message(message.role, message.content)]
        blocks = [(block, f"{place}.content[{k}]") for k, block in enumerate(message.content)]
        if message.role == "assistant":
            return self._answers(blocks)
        return self._question(message.role, blocks, is_asked=is_asked)

    def _question(self, role: str, blocks: list[tuple[ContentBlock, str]], *, is_asked: bool) -> list[Json]:
        """Chat templates expect the results right behind the calls, so they come before the text of the same message."""
        results = self._results(blocks)
        others = [(block, where) for block, where in blocks if not isinstance(block, ToolResultBlock)]
        pieces = self._all_pieces(others, is_asked=is_asked)
        if pieces or not results:
            return [*results, chat_message(role, _content(pieces))]
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
        pieces = self._all_pieces([pair for pair in blocks if not isinstance(pair[0], _OF_ASSISTANT)], is_asked=False)
        thoughts = [block.thinking for block in own if isinstance(block, ThinkingBlock) and block.thinking]
        calls = [chat_call(block.id, block.name, block.input) for block in own if isinstance(block, ToolUseBlock)]
        if len(calls) > MAX_TOOLS:
            raise FieldError("messages", f"messages: too many tool_calls: {too_many(MAX_TOOLS, len(calls))}")
        return chat_message(
            "assistant",
            _content(pieces) if pieces or not calls else None,
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
            pieces = self._result(block.content or "", f"{where}.content")
            if block.is_error:
                pieces = _with_error(pieces)
            found.append(chat_message("tool", _content(pieces), tool_call_id=block.tool_use_id))
        return found

    def _result(self, content: str | Sequence[StrictModel], where: str) -> list[Piece]:
        return [content] if isinstance(content, str) else self._inner(content, where, is_asked=False)

    def _all_pieces(self, blocks: Sequence[tuple[StrictModel, str]], *, is_asked: bool) -> list[Piece]:
        return [piece for block, where in blocks for piece in self._pieces(block, where, is_asked=is_asked)]

    def _inner(self, blocks: Sequence[StrictModel], where: str, *, is_asked: bool) -> list[Piece]:
        return self._all_pieces([(block, f"{where}[{i}]") for i, block in enumerate(blocks)], is_asked=is_asked)

    def _pieces(self, block: StrictModel, where: str, *, is_asked: bool) -> list[Piece]:
        """What the model reads of a block. Empty if the block is left out."""
        match block:
            case TextBlock():
                return [block.text]
            case ImageBlock() if self._images.are_read:
                return [self._image(block, where)]
            case CompactionBlock():
                return [block.content]
            case DocumentBlock():
                pieces = self._document(block.source, f"{where}.source", is_asked=is_asked)
                return [piece for piece in (block.title, block.context, *pieces) if piece]
            case SearchResultBlock():
                pieces = self._inner(block.content, f"{where}.content", is_asked=is_asked)
                return [piece for piece in (block.title, block.source, *pieces) if piece]
            case ToolReferenceBlock():
                return [self._definition(block.tool_name)]
            case ToolAdditionBlock() if (text := self._addition(block)) is not None:
                return [text]
            case OtherBlock() if text_instead(block.type, self._images):
                return [self._text_instead(block, where, is_asked=is_asked)]
            case _:
                self._leave_out(block, where)
                return []

    def _image(self, block: ImageBlock, where: str) -> PlacedImage:
        if isinstance(block.source, Base64Source):
            return self._images.add_base64(block.source.data, f"{where}.source.data", block.source.media_type or "")
        return self._images.add(block.source.url, f"{where}.source.url")

    def _text_instead(self, block: OtherBlock, where: str, *, is_asked: bool) -> str:
        if is_asked:
            check_medium(block.type, f"{where}.type", self._images)
        self._leave_out(block, where)
        return text_instead(block.type, self._images)

    def _document(self, source: PlainSource | BlocksSource, where: str, *, is_asked: bool) -> list[Piece]:
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


def _content(pieces: Sequence[Piece]) -> str | list[TextPart | PlacedImage]:
    """One text; with images, parts. Texts that follow each other are one, with a line break between."""
    made: list[TextPart | PlacedImage] = []
    for is_text, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        together = list(group)
        if is_text:
            made.append(TextPart(type="text", text="\n".join(each for each in together if isinstance(each, str))))
        else:
            made += [each for each in together if isinstance(each, PlacedImage)]
    if any(isinstance(part, PlacedImage) for part in made):
        return made
    return "".join(part.text for part in made if isinstance(part, TextPart))


def _with_error(pieces: list[Piece]) -> list[Piece]:
    if pieces and isinstance(pieces[0], str):
        return [f"Error: {pieces[0]}", *pieces[1:]]
    return ["Error: ", *pieces]


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
