"""Turns a request to /v1/responses into the chat that the server answers."""

import asyncio
from dataclasses import dataclass, fields
from typing import Any

from inflight.entrypoints.openai.chat import validate_chat
from inflight.entrypoints.openai.errors import ApiError, FieldError
from inflight.entrypoints.openai.generation_fields import SamplingFields
from inflight.entrypoints.openai.messages import MAX_TOOLS
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.openai.server import ApiServer
from inflight.entrypoints.openai.strict_model import StrictModel
from inflight.entrypoints.openai.validated import ValidatedRequest
from inflight.entrypoints.responses_api.items import (
    AdditionalToolsItem,
    CallOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ServerCallItem,
)
from inflight.entrypoints.responses_api.protocol import LOGPROBS, PlainFormat, ResponsesRequest, SchemaFormat
from inflight.entrypoints.responses_api.tools import INPUT, NamedTool, PromptTools, prompt_name

# fields that mean the same in a chat
_SAME = (
    *SamplingFields.model_fields,
    *"model parallel_tool_calls stream chat_template_kwargs cache_salt priority".split(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedResponse(ValidatedRequest):
    """
    Attributes:
        asked: the request, whose values the answer repeats.
        tools: the functions that the model sees.
    """

    asked: ResponsesRequest
    tools: PromptTools


async def validate_response(server: ApiServer, body: ResponsesRequest) -> ValidatedResponse:
    """Check, render and tokenise a request. No generation is started.

    Raises:
        ApiError, InvalidRequestError: the request is wrong.
    """
    if body.previous_response_id is not None:
        raise ApiError(
            404,
            f"Previous response with id {body.previous_response_id!r} not found: this server stores no responses. Send the "
            "whole conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    markup = server.parsers.markup
    can_enforce = markup is not None and markup.arguments is None and not markup.only_forced
    items = [] if isinstance(body.input, str) else body.input
    added = [tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools]
    tools = PromptTools([*(body.tools or ()), *added], enforces_patterns=can_enforce)
    # in a thread, because there may be thousands of items
    validated = await validate_chat(server, await asyncio.to_thread(_chat, body, tools))
    same = {field.name: getattr(validated, field.name) for field in fields(ValidatedRequest)}
    left_out = [
        *tools.left_out,
        *(f"input[] ({item.type})" for item in items if isinstance(item, ServerCallItem | ItemReference)),
    ]
    return ValidatedResponse(**{**same, "left_out": tuple(left_out)}, asked=body, tools=tools)


def _chat(body: ResponsesRequest, tools: PromptTools) -> ChatCompletionRequest:
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    choice = body.tool_choice
    given["tool_choice"] = tools.choice(choice) if isinstance(choice, NamedTool) else choice
    given |= {
        "messages": _Messages(body).messages,
        "tools": tools.functions or None,
        "max_tokens": body.max_output_tokens,
    }
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.reasoning is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        given["response_format"] = _response_format(body.text.format)
    return ChatCompletionRequest(**given)


def _response_format(wanted: PlainFormat | SchemaFormat) -> dict[str, Any]:
    if isinstance(wanted, PlainFormat):
        return {"type": wanted.type}
    return {"type": wanted.type, "json_schema": wanted.model_dump(by_alias=True, exclude={"type"})}


class _Messages:
    """The messages of the chat. The reasoning, the text and the calls of one turn of the assistant are one message, as in the
    answer of a chat."""

    def __init__(self, body: ResponsesRequest) -> None:
        """
        Raises:
            FieldError: the input has no message, or a name is too long.
            ApiError: an item refers to a stored item.
        """
        self.messages: list[dict[str, Any]] = []  # Any: the fields of `ChatMessage`
        self._turn: dict[str, Any] | None = None  # the last message, if more of its turn may follow
        if body.instructions is not None:
            self._add("system", content=body.instructions)
        if isinstance(body.input, str):
            self._add("user", content=body.input)
            return
        for i, item in enumerate(body.input):
            self._add_item(item, f"input[{i}]")
        if not self.messages:
            raise FieldError("input", "input has no message: add one")

    def _add_item(self, item: StrictModel, where: str) -> None:
        if isinstance(item, MessageItem):
            if item.role == "assistant":
                self._turn_without("content", "tool_calls")["content"] = item.content
            else:
                self._add(item.role, content=item.content)
        elif isinstance(item, ReasoningItem):
            if item.text:  # without text, it is of another server, and encrypted
                turn = self._turn_without("content", "tool_calls")
                turn["reasoning_content"] = "\n\n".join(filter(None, (turn.get("reasoning_content"), item.text)))
        elif isinstance(item, FunctionCallItem | CustomToolCallItem):
            self._add_call(item, where)
        elif isinstance(item, CallOutputItem):
            self._add("tool", content=item.output, tool_call_id=item.call_id)
        elif isinstance(item, ItemReference) and not item.is_of_reasoning:
            raise ApiError(
                404,
                f"Item with id {item.id!r} not found: this server stores no items. Send the item itself.",
                param=f"{where}.id",
                code="not_found",
            )

    def _add_call(self, item: FunctionCallItem | CustomToolCallItem, where: str) -> None:
        name = prompt_name(item.name, item.namespace, f"{where}.name")
        arguments = {INPUT: item.input} if isinstance(item, CustomToolCallItem) else item.arguments
        turn = self._turn_without()
        if len(turn.setdefault("tool_calls", [])) == MAX_TOOLS:
            turn = self._turn_without("tool_calls")
            turn["tool_calls"] = []
        turn["tool_calls"].append({"id": item.call_id, "function": {"name": name, "arguments": arguments}})

    def _turn_without(self, *names: str) -> dict[str, Any]:
        """The assistant's turn so far; a new one if it already has one of these fields."""
        if self._turn is None or not self._turn.keys().isdisjoint(names):
            self._add("assistant")
            self._turn = self.messages[-1]
        return self._turn

    def _add(self, role: str, **members: Any) -> None:
        self.messages.append({"role": role, **members})
        self._turn = None
