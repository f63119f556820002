"""The blocks of the content of Anthropic's messages, as pydantic models.

The lists of blocks are open. Anthropic adds types of blocks, and conversations have blocks that only its servers can read. Such
a block is an `OtherBlock`, which does not end the conversation. The values of a block whose type is known are checked.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from inflight.entrypoints.fields.images import OtherPart
from inflight.entrypoints.fields.messages import ToolName, result_text, without_empty_list
from inflight.entrypoints.fields.sampling_fields import Schema
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional

CacheControl = Annotated[dict[str, Any] | None, no_effect("Equal prefixes are found without marks.")]
_SOURCES = {
    "document": ("text", "content"),
    "image": ("base64", "url"),
}  # type of block -> types of sources that are read
_OTHER = "block of another type"  # the tags have spaces, so that none is taken for the name of a field in an error


class ToolDefinition(StrictModel):
    name: ToolName
    type: str | None = optional(
        "custom, or left out. A tool of another type, which Anthropic defines, is ignored and reported."
    )
    description: str | None = None
    input_schema: Schema | None = optional("A JSON schema of type object.")
    strict: bool | None = optional("The input is made to satisfy the schema.")
    defer_loading: bool | None = optional("True: the model does not see the tool until a tool_reference names it.")
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = no_effect("Inputs are always streamed as they are written.")

    @property
    def is_own(self) -> bool:
        """Whether this server knows what the tool is. Anthropic defines the others."""
        return self.type in (None, "custom")

    @property
    def is_listed(self) -> bool:
        return self.is_own and not self.defer_loading


class OtherBlock(OtherPart):
    """A block that the model cannot read. It is left out, or replaced by a text that says what it was."""

    id: Any = None  # the id of a call: if a call is left out, its result is left out, too


class Base64Source(StrictModel):
    type: Literal["base64"]
    media_type: str | None = optional("Such as image/png. The server looks at the data.", max_length=256)
    data: str


class UrlSource(StrictModel):
    type: Literal["url"]
    url: str = Field(description="https:, http: or file: where the server allows it, or data:.")


class ImageBlock(OtherBlock):
    """An image. If the model takes no images, it counts as a block of another type."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = no_effect("From other models.")


class ThinkingBlock(StrictModel):
    """A thought of the assistant, as an answer of this server has it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = no_effect("Thoughts are not checked.")


class RedactedThinkingBlock(StrictModel):
    """A thought of another model that only its server can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: str | None = no_effect("Only another server can read it.")


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: Annotated[dict[str, Any], BeforeValidator(without_empty_list)]
    cache_control: CacheControl = None


class ToolReferenceBlock(StrictModel):
    type: Literal["tool_reference"]
    tool_name: ToolName = Field(description="A tool with defer_loading. Its definition is written here.")
    cache_control: CacheControl = None


class AddedTool(StrictModel):
    """A tool with defer_loading, or the definition of a tool. References to other tools are of another type."""

    type: str
    name: ToolName | None = optional("The name of a tool with defer_loading.")
    tool_name: ToolName | None = optional("Another name of the field name.")
    definition: ToolDefinition | None = optional("The tool.")


class ToolAdditionBlock(StrictModel):
    """A tool that the model can call from here on. Its definition is written here."""

    type: Literal["tool_addition"]
    tool: AddedTool


class CompactionBlock(StrictModel):
    """The summary of the conversation before it."""

    type: Literal["compaction"]
    content: str
    cache_control: CacheControl = None
    encrypted_content: str | None = no_effect("Only another server can read it.")


def _kind_of(known: frozenset[str], block: object) -> str:
    """The tag of a block, which begins with its type."""
    if isinstance(block, OtherBlock):
        return "image block" if isinstance(block, ImageBlock) else _OTHER
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    if not isinstance(kind, str):
        return "text block"  # its error says that `type` is missing or wrong
    if kind not in known or (isinstance(block, dict) and not _is_readable(kind, block)):
        return _OTHER
    return f"{kind} block"


def _is_readable(kind: str, block: dict[str, Any]) -> bool:
    """Whether a block of a known type can be read: a document may be an image, an image may be a file that another server has
    stored, and a summary may be missing."""
    if kind in _SOURCES:
        source = block.get("source")
        return isinstance(source, dict) and source.get("type") in _SOURCES[kind]
    return kind != "compaction" or block.get("content") is not None


def _kinds(*names: str) -> Callable[[object], str]:
    """A function that gives each block its tag, where blocks of the types `names` are read."""
    known = frozenset(names)

    def tag(block: object) -> str:  # pydantic wants a function with a name
        return _kind_of(known, block)

    return tag


# in a document and in the result of a search
InnerBlock = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ImageBlock, Tag("image block")]
    | Annotated[OtherBlock, Tag(_OTHER)],
    Discriminator(_kinds("text", "image")),
]
InnerBlocks = Annotated[list[InnerBlock], Field(fail_fast=True)]


class PlainSource(StrictModel):
    type: Literal["text"]
    data: str
    media_type: str | None = no_effect("Plain text.")


class BlocksSource(StrictModel):
    type: Literal["content"]
    content: str | InnerBlocks


class DocumentBlock(StrictModel):
    """A document of text and images. Other documents are media, which the model cannot read."""

    type: Literal["document"]
    source: Annotated[PlainSource | BlocksSource, Field(discriminator="type")]
    title: str | None = optional("Written before the text.")
    context: str | None = optional("Written before the text.")
    citations: dict[str, Any] | None = no_effect("The model is not asked to cite.")
    cache_control: CacheControl = None


class SearchResultBlock(StrictModel):
    type: Literal["search_result"]
    source: str = Field(description="Written before the text.")
    title: str = Field(description="Written before the text.")
    content: InnerBlocks
    citations: dict[str, Any] | None = no_effect("The model is not asked to cite.")
    cache_control: CacheControl = None


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference block")]
    | Annotated[DocumentBlock, Tag("document block")]
    | Annotated[SearchResultBlock, Tag("search_result block")]
    | Annotated[ImageBlock, Tag("image block")]
    | Annotated[OtherBlock, Tag(_OTHER)],
    Discriminator(_kinds("text", "tool_reference", "document", "search_result", "image")),
]


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None, BeforeValidator(result_text)
    ] = optional("Text, blocks, or any other JSON, which the model reads as text.")
    is_error: bool | None = optional('True: the model reads "Error: " before the content.')
    cache_control: CacheControl = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ThinkingBlock, Tag("thinking block")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking block")]
    | Annotated[ToolUseBlock, Tag("tool_use block")]
    | Annotated[ToolResultBlock, Tag("tool_result block")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference block")]
    | Annotated[ToolAdditionBlock, Tag("tool_addition block")]
    | Annotated[DocumentBlock, Tag("document block")]
    | Annotated[SearchResultBlock, Tag("search_result block")]
    | Annotated[CompactionBlock, Tag("compaction block")]
    | Annotated[ImageBlock, Tag("image block")]
    | Annotated[OtherBlock, Tag(_OTHER)],
    Discriminator(
        _kinds(
            "text",
            "thinking",
            "redacted_thinking",
            "tool_use",
            "tool_result",
            "tool_reference",
            "tool_addition",
            "document",
            "search_result",
            "compaction",
            "image",
        )
    ),
]
ContentBlocks = Annotated[list[ContentBlock], Field(fail_fast=True)]
