"""The messages and tools of a chat request, and how they are handed to the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.model import StrictModel, neutral, no_effect

MAX_MESSAGES = 10_000
MAX_TOOLS = 512
MAX_ARGUMENTS = 2**18  # characters of one call

ToolName = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class CalledFunction(StrictModel):
    name: ToolName
    arguments: str = Field(max_length=MAX_ARGUMENTS, description="A JSON object, as text.")


class ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, no_effect("As it came from a stream.")] = None


class ChatMessage(StrictModel):
    """One message. What an answer of this server holds may be sent back as it is."""

    role: Literal["developer", "system", "user", "assistant", "tool"] = Field(description="developer is system.")
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        None, description="Text; None with tool_calls only."
    )
    name: str | None = Field(None, description="For templates that show it.")
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS, description="Calls that were made."
    )
    tool_call_id: str | None = Field(None, description="Which call this is the result of.")
    reasoning_content: str | None = Field(None, description="For templates that show it.")
    reasoning: str | None = Field(None, description="Newer name of reasoning_content.")
    refusal: Annotated[None, neutral("This server makes none.")] = None
    audio: Annotated[None, neutral("Text only.")] = None
    function_call: Annotated[None, neutral("Use tool_calls.")] = None
    annotations: Annotated[list[Any] | None, neutral("This server makes none.", max_length=0)] = None


class FunctionDefinition(StrictModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of type object.")
    strict: bool | None = Field(None, description="Arguments are made to satisfy the schema.")


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    name: ToolName


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """What the template sees: the fields that are given; the arguments of calls as objects, which templates write as JSON."""
    return [_template_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _template_message(where: str, message: ChatMessage) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer":
        plain["role"] = "system"
    for i, call in enumerate(plain.get("tool_calls", ())):
        call.pop("index", None)
        path = f"{where}.tool_calls[{i}].function.arguments"
        call["function"]["arguments"] = _arguments(path, call["function"]["arguments"])
    return plain


def _arguments(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise FieldError(where, f"{where} is not valid JSON") from error
    if not isinstance(value, dict):
        raise FieldError(where, f"{where} is not a JSON object")
    return value
