"""The messages and tools of a chat request, as pydantic models and in the form that a chat template gets."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from inflight.entrypoints.openai.content_parts import ContentPart, OtherPart, TextPart, ThinkingPart, readable_parts
from inflight.entrypoints.openai.strict_model import StrictModel, neutral, no_effect, optional
from inflight.parsers.surrogates import without_lone_surrogates
from inflight.tokenizer.call_arguments import parse_object

MAX_MESSAGES = 10_000
MAX_TOOLS = 512
MAX_ARGUMENTS = 2**18  # characters per call
MAX_TOOL_NAME = 256  # characters
_NOT_SHOWN = {"refusal", "audio", "annotations"}  # fields that are accepted and not passed to templates

ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]


Role = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")]


class CalledFunction(StrictModel):
    name: ToolName
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS)] | dict[str, Any] | None = optional(
        "A JSON object, usually as text. Text that is cut or malformed is accepted."
    )


class ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = no_effect("Clients that join the chunks of a stream may leave it in a call.")


def result_text(content: object) -> object:
    """The content of a tool's result. If it is JSON of another form than text and parts, it becomes text."""
    if content is None or isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content))):
        return content
    return json.dumps(content, ensure_ascii=False)


def _is_part(value: object) -> bool:
    return isinstance(value, StrictModel) or (isinstance(value, dict) and isinstance(value.get("type"), str))


class ChatMessage(StrictModel):
    """One message of a chat. A message from this server's answers may be sent back unchanged. The result of a tool may be any
    JSON."""

    role: Role = Field(
        description="developer has the same meaning as system. Names of other roles are passed to the chat template."
    )
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = optional(
        "The text; may be null in messages of the assistant and of tools."
    )
    name: str | None = optional("Used only by templates that show it.")
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = optional(
        "Calls that were made.", max_length=MAX_TOOLS
    )
    tool_call_id: str | None = optional("The id of the call whose result this message has.")
    reasoning_content: str | None = optional("Used only by templates that show it.")
    reasoning: str | None = optional("Newer name of reasoning_content.")
    function_call: None = neutral("Use tool_calls.")
    refusal: str | None = no_effect("From other models; templates do not see it.")
    audio: dict[str, Any] | None = no_effect("From other models; its text is in content.")
    annotations: list[Any] | None = no_effect("From other models; templates do not see them.")

    @model_validator(mode="before")
    @classmethod
    def _read_result(cls, message: Any) -> Any:  # Any: JSON, not checked yet
        if isinstance(message, dict) and message.get("role") in ("tool", "function"):
            return {**message, "content": result_text(message.get("content"))}
        return message

    @field_validator("content")
    @classmethod
    def _check_thoughts(
        cls, content: str | list[TextPart | ThinkingPart | OtherPart] | None, info: ValidationInfo
    ) -> str | list[TextPart | ThinkingPart | OtherPart] | None:
        has_thoughts = isinstance(content, list) and any(isinstance(part, ThinkingPart) for part in content)
        if has_thoughts and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError(
                "part_type", "a part of the type 'thinking' is read only in messages of the role 'assistant'"
            )
        return content

    @property
    def text(self) -> str:
        """The text of the content."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""


class FunctionDefinition(StrictModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema of type object.")
    strict: bool | None = optional("Arguments are made to satisfy the schema.")


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    name: ToolName


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def leave_out_parts(messages: Sequence[ChatMessage]) -> list[str]:
    """Remove the parts that the model cannot read from the messages (`readable_parts`). Returns their names for the header of
    the answer.

    Raises:
        FieldError: the client asks about a medium.
    """
    left_out: list[str] = []
    num_answered = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
    for i, message in enumerate(messages):
        if isinstance(message.content, list) and any(isinstance(part, OtherPart) for part in message.content):
            is_asked = i >= num_answered and message.role != "tool"
            parts = readable_parts(message.content, f"messages[{i}].content", left_out, is_asked=is_asked)
            message.content = parts or ""
    return left_out


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages for the template, with only the fields that the request gives. The arguments of calls become objects,
    because templates write objects as JSON. Arguments that are not a JSON object stay text: the model may have made a mistake,
    or `max_tokens` may have cut them off."""
    return [_template_message(message) for message in messages]


def read_arguments(text: str) -> dict[str, Any]:
    """The readable part of the arguments of an answer that were cut: {"city": ""} for '{"city": "'. A text that is not the
    beginning of an object of JSON becomes the only member, as Anthropic's documentation advises: nobody takes it for a call
    without arguments."""
    found = parse_object(without_lone_surrogates(text), allow_partial="trailing-strings")
    return ({"INVALID_JSON": text} if text.strip() else {}) if found is None else found


def _template_message(message: ChatMessage) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude=_NOT_SHOWN)
    if message.role == "developer":
        plain["role"] = "system"
    for call in plain.get("tool_calls", ()):
        call.pop("index", None)
        call.setdefault("type", "function")
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            text = without_lone_surrogates(arguments)
            found = parse_object(text)
            arguments = text if found is None else found
        call["function"]["arguments"] = arguments
    return plain


def read_object(text: str) -> dict[str, Any] | None:  # Any: JSON
    """The JSON object in `text`, or None if `text` is not a JSON object. NaN and infinite numbers are not JSON."""
    return parse_object(without_lone_surrogates(text))
