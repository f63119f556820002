"""The bodies of requests to /v1/messages and /v1/messages/count_tokens, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.entrypoints.anthropic.blocks import CacheControl, ContentBlocks, ToolDefinition
from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.entrypoints.fields.messages import MAX_MESSAGES, MAX_TOOLS, Role, ToolName
from inflight.entrypoints.fields.sampling_fields import MAX_INT, SamplingFields
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional

MAX_MODEL_NAME = 256  # characters


class InputMessage(StrictModel):
    role: Role = Field(
        description="user, assistant, system, or another role of the chat template. A system message stays at its place."
    )
    content: str | ContentBlocks


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = optional("The tool that must be called; only with the type tool.")
    disable_parallel_tool_use: bool | None = optional("True: at most one call.")


class CountTokensRequest(ConstraintFields):
    """POST /v1/messages/count_tokens"""

    model: str | None = optional(
        "Any name, which the answer repeats; with --strict-model-names one of those in /v1/models.",
        min_length=1,
        max_length=MAX_MODEL_NAME,
    )
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="The conversation. If the last message is the assistant's, the answer continues it."
    )
    system: str | ContentBlocks | None = optional("The system prompt, without the line x-anthropic-billing-header.")
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = optional(
        "Tools the model may call.", max_length=MAX_TOOLS
    )
    tool_choice: ToolChoice | None = optional("auto, any, none, or one tool by name.")
    cache_control: CacheControl = None

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of the answer; None if there is no limit, or no answer."""
        return None

    @property
    def is_stream(self) -> bool:
        return False


class MessagesRequest(CountTokensRequest, SamplingFields):
    """POST /v1/messages"""

    max_tokens: int | None = optional("The most tokens of an answer, cut to the room in the context.", ge=1, le=MAX_INT)
    stream: bool | None = optional("Server-sent events.")
    metadata: dict[str, Any] | None = no_effect("Data of the caller; nothing is stored.")
    service_tier: str | None = no_effect("There is only one tier.")

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def is_stream(self) -> bool:
        return bool(self.stream)
