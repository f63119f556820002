"""The bodies of requests to /v1/messages and /v1/messages/count_tokens, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from inflight.entrypoints.openai.generation_fields import MAX_INT, SamplingFields, Schema, StopList
from inflight.entrypoints.openai.messages import MAX_MESSAGES, MAX_TOOLS, ToolName, result_text
from inflight.entrypoints.openai.protocol import ReasoningEffort
from inflight.entrypoints.openai.strict_model import StrictModel, no_effect, optional

MAX_MODEL_NAME = 256  # characters
_MEDIA = ("image", "document", "container_upload")
CacheControl = Annotated[dict[str, Any] | None, no_effect("Equal prefixes are found without marks.")]


def _check_medium(block: object) -> object:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        raise PydanticCustomError("part_type", f"a block of the type {kind!r} is not text; this model takes text only")
    return block


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
    input: dict[str, Any]
    cache_control: CacheControl = None


class ToolReferenceBlock(StrictModel):
    type: Literal["tool_reference"]
    tool_name: ToolName = Field(description="A tool with defer_loading. Its definition is written here.")
    cache_control: CacheControl = None


ResultBlock = Annotated[
    Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type")], BeforeValidator(_check_medium)
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
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
    ],
    BeforeValidator(_check_medium),
]


class InputMessage(StrictModel):
    role: Literal["user", "assistant", "system"] = Field(description="A system message stays at its place.")
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)]


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


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = optional("The tool that must be called; only with the type tool.")
    disable_parallel_tool_use: bool | None = optional("True: at most one call.")


class Thinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = optional(
        "The most tokens of the thoughts, which are then closed; max_tokens counts them, too.", ge=0, le=MAX_INT
    )
    display: str | None = no_effect("Thoughts are always sent.")


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema", description="The JSON schema that the text satisfies. It is not strict.")


class OutputConfig(StrictModel):
    effort: ReasoningEffort | None = optional(
        "The variable reasoning_effort of the chat template, such as low, high or max. If it has none, the effort bounds "
        "the thoughts (docs/reasoning.md)."
    )
    format: OutputFormat | None = None


class CountTokensRequest(StrictModel):
    """POST /v1/messages/count_tokens"""

    model: str | None = optional(
        "Any name, which the answer repeats; with --strict-model-names one of those in /v1/models.",
        min_length=1,
        max_length=MAX_MODEL_NAME,
    )
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="The conversation. If the last message is the assistant's, the answer continues it."
    )
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = optional(
        "The system prompt, without the line x-anthropic-billing-header."
    )
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = optional(
        "Tools the model may call.", max_length=MAX_TOOLS
    )
    tool_choice: ToolChoice | None = optional("auto, any, none, or one tool by name.")
    thinking: Thinking | None = optional(
        "enabled and adaptive switch thinking on, if the chat template can; disabled forbids it. Left out: off if the chat "
        "template can, unless --default-chat-template-kwargs says otherwise."
    )
    output_config: OutputConfig | None = optional("The effort, and the format of the text.")
    output_format: OutputFormat | None = optional("Older name of output_config.format.")
    cache_control: CacheControl = None


class MessagesRequest(CountTokensRequest, SamplingFields):
    """POST /v1/messages"""

    max_tokens: int | None = optional("The most tokens of an answer, cut to the room in the context.", ge=1, le=MAX_INT)
    stream: bool | None = optional("Server-sent events.")
    stop_sequences: StopList | None = optional("Strings that end the text. Empty ones are ignored.")
    metadata: dict[str, Any] | None = no_effect("Data of the caller; nothing is stored.")
    service_tier: str | None = no_effect("There is only one tier.")
