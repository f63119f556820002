"""Reads a request to /v1/responses as a `ChatRequest`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from inflight.entrypoints.fields.content_parts import readable_parts
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import RequestImages
from inflight.entrypoints.fields.messages import MAX_TOOLS, chat_call, chat_message
from inflight.entrypoints.fields.offered_tools import tool_choice_of
from inflight.entrypoints.fields.parameters import sampling_params
from inflight.entrypoints.fields.strict_model import StrictModel
from inflight.entrypoints.http.chat import validate_chat
from inflight.entrypoints.http.chat_request import ChatPrompt, ChatRequest, Json
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.thinking import thoughts_of
from inflight.entrypoints.http.validated import Presentation, ValidatedRequest
from inflight.entrypoints.response_store.responses import StoredResponses
from inflight.entrypoints.responses_api.client_tools import output_text
from inflight.entrypoints.responses_api.items import (
    AdditionalToolsItem,
    CallOutputItem,
    ClientCallItem,
    ClientOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    ItemReference,
    MessageItem,
    OtherItem,
    ReasoningItem,
    Text,
)
from inflight.entrypoints.responses_api.kept import Kept, WholeInput, kept_of, whole_input
from inflight.entrypoints.responses_api.protocol import LOGPROBS, ResponsesRequest
from inflight.entrypoints.responses_api.tools import ClientToolChoice, NamedTool, PromptTools, prompt_name
from inflight.tokenizer.history.other_calls import INPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedResponse(ValidatedRequest):
    """
    Attributes:
        asked: the request, whose values the answer repeats.
        tools: the functions that the model sees.
        kept: how the response is stored; None if it is not.
    """

    asked: ResponsesRequest
    tools: PromptTools
    kept: Kept | None = None


async def validate_response(server: ApiServer, body: ResponsesRequest, responses: StoredResponses) -> ValidatedResponse:
    """Check, render and tokenise a request. No generation is started.

    Raises:
        ApiError, InvalidRequestError: the request is wrong.
    """
    whole = await whole_input(body, responses)
    kept = kept_of(body, responses, whole)
    markup = server.parsers.markup
    can_enforce = markup is not None and markup.arguments is None and not markup.only_forced
    items = whole.items
    added = [tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools]
    found = [tool for item in items if isinstance(item, ClientOutputItem) for tool in item.tools or ()]
    tools = PromptTools(body.tools or (), enforces_patterns=can_enforce, added=added, found=found)
    validated = await validate_chat(server, partial(_read_chat, server, body, tools, whole))
    same = {field.name: getattr(validated, field.name) for field in fields(ValidatedRequest)}
    return ValidatedResponse(**same, asked=body, tools=tools, kept=kept)


def _read_chat(server: ApiServer, body: ResponsesRequest, tools: PromptTools, whole: WholeInput) -> ChatRequest:
    choice = body.tool_choice
    wanted = tools.choice(choice) if isinstance(choice, NamedTool | ClientToolChoice) else choice
    images = server.new_images()
    read = _Messages(body.instructions, whole, tools, images)
    model = server.check_model(body.model)
    tool_choice = tool_choice_of(tools.functions, wanted)
    thoughts = thoughts_of(body)
    has_logprobs = body.top_logprobs or LOGPROBS in (body.include or ())
    return ChatRequest(
        prompt=ChatPrompt(
            messages=read.chat_messages(),
            places=read.places,
            images=images.sources,
            tools=tools.functions,
            variables=body.chat_template_kwargs or {},
        ),
        hidden_tools=tools.hidden,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        params=sampling_params(
            body,
            server.engine.default_params,
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if has_logprobs else None,
        ),
        thoughts=thoughts,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        presentation=Presentation(model=model, stream=bool(body.stream), reasoning=not body.hides_reasoning),
        left_out=(*tools.left_out, *read.left_out),
    )


class _Messages:
    """The messages of the chat. The reasoning, the text and the calls of one turn of the assistant are one message, as in the
    answer of a chat.

    Attributes:
        places: for each message the field of the request that it begins with.
        left_out: the names of the items and parts that the model does not see, for the answer's header.
    """

    def __init__(self, instructions: str | None, whole: WholeInput, tools: PromptTools, images: RequestImages) -> None:
        """
        Raises:
            FieldError: the input has no message, a name is too long, or the client asks about a medium that the model cannot
                read.
            ApiError: an item refers to a stored item that is not there.
        """
        self.messages: list[dict[str, Any]] = []  # Any: the arguments of `chat_message`
        self.places: list[str] = []
        self.left_out: list[str] = []
        self._where = "instructions"
        self._tools = tools
        self._images = images
        self._turn: dict[str, Any] | None = None  # the last message, if more of its turn may follow
        if instructions is not None:
            self._add("system", content=instructions)
        items = whole.items
        self._num_answered = _num_answered(items)
        left_out = frozenset(_left_out_calls(items))
        num_earlier = len(whole.earlier)
        for i, item in enumerate(items):
            if i < num_earlier:
                self._where = "previous_response_id"
            else:
                self._where = "input" if isinstance(whole.own, str) else f"input[{i - num_earlier}]"
            if isinstance(item, OtherItem) or getattr(item, "call_id", None) in left_out or _is_of_server(item):
                self.left_out.append(f"input[] ({item.type})")
            else:
                self._add_item(item, i)
        if not self.messages:
            raise FieldError("input", "input has no message: add one")

    def chat_messages(self) -> list[Json]:
        return [chat_message(**{"content": None, **message}) for message in self.messages]

    def _add_item(self, item: StrictModel, index: int) -> None:
        where = self._where
        if isinstance(item, MessageItem):
            is_answer = item.role == "assistant"
            is_asked = index >= self._num_answered and item.role != "tool"
            content = self._readable(item.content, f"{where}.content", is_asked=is_asked)
            if is_answer:
                self._turn_without("content", "tool_calls")["content"] = content
            else:
                self._add(item.role, content=content)
        elif isinstance(item, ReasoningItem):
            self.left_out += [f"input[].{place}" for place in item.unread]
            if item.text:  # without text, it is of another server, and encrypted
                turn = self._turn_without("content", "tool_calls")
                turn["reasoning_content"] = "\n\n".join(filter(None, (turn.get("reasoning_content"), item.text)))
        elif isinstance(item, FunctionCallItem | CustomToolCallItem):
            name = prompt_name(item.name, item.namespace, f"{where}.name")
            arguments = {INPUT: item.input} if isinstance(item, CustomToolCallItem) else item.arguments
            self._add_call(item.call_id, name, arguments)
        elif isinstance(item, ClientCallItem):
            self._add_call(item.call_id or item.id, item.kind.type, item.called_with)
        elif isinstance(item, CallOutputItem):
            content = self._readable(item.output, f"{where}.output", is_asked=False)
            self._add("tool", content=content, tool_call_id=item.call_id)
        elif isinstance(item, ClientOutputItem):
            self._add("tool", content=self._output(item), tool_call_id=item.call_id or item.id)
        elif isinstance(item, ItemReference):
            self._refer(item, where)

    def _refer(self, item: ItemReference, where: str) -> None:
        if not item.is_of_reasoning:
            raise ApiError(
                404,
                f"Item with id {item.id!r} not found: it was not stored, or was deleted. Send the item itself.",
                param=f"{where}.id",
                code="not_found",
            )
        self.left_out.append(f"input[] ({item.type})")

    def _readable(self, content: Text, where: str, *, is_asked: bool) -> str | list[StrictModel]:
        if isinstance(content, str):
            return content
        return [*readable_parts(content, where, self.left_out, self._images, is_asked=is_asked)] or ""

    def _output(self, item: ClientOutputItem) -> str:
        """The result of a call. Tools that were found are defined in it, because the model sees no other definition of them."""
        if item.tools is None:
            return output_text(item.output, item.status)
        lines = [json.dumps(tool, ensure_ascii=False) for tool in self._tools.definitions(item.tools)]
        return "\n".join(lines) or "No tool was found."

    def _add_call(self, call_id: str | None, name: str, arguments: str | dict[str, Any]) -> None:
        turn = self._turn_without()
        if len(turn.setdefault("tool_calls", [])) == MAX_TOOLS:
            turn = self._turn_without("tool_calls")
            turn["tool_calls"] = []
        turn["tool_calls"].append(chat_call(call_id, name, arguments))

    def _turn_without(self, *names: str) -> dict[str, Any]:
        """The assistant's turn so far; a new one if it already has one of these fields."""
        if self._turn is None or not self._turn.keys().isdisjoint(names):
            self._add("assistant")
            self._turn = self.messages[-1]
        return self._turn

    def _add(self, role: str, **members: Any) -> None:
        self.messages.append({"role": role, **members})
        self.places.append(self._where)
        self._turn = None


def _num_answered(items: Sequence[StrictModel]) -> int:
    """The number of the items up to the last one that a model has written."""
    written = (FunctionCallItem, CustomToolCallItem, ClientCallItem, ReasoningItem)
    return max(
        (
            i + 1
            for i, item in enumerate(items)
            if isinstance(item, written) or (isinstance(item, MessageItem) and item.role == "assistant")
        ),
        default=0,
    )


def _left_out_calls(items: Sequence[StrictModel]) -> Iterator[str]:
    """The ids of the calls that are left out, so that their results are left out, too."""
    known = (FunctionCallItem, CustomToolCallItem, ClientCallItem)
    kept = {item.call_id for item in items if isinstance(item, known)}
    for item in items:
        if isinstance(item, OtherItem) and isinstance(item.call_id, str) and item.call_id not in kept:
            yield item.call_id


def _is_of_server(item: StrictModel) -> bool:
    """Whether this is a search for tools that OpenAI's servers have made."""
    return isinstance(item, ClientCallItem | ClientOutputItem) and item.execution == "server"
