"""`to_chat`: turns a request to /v1/messages into the chat request that means the same.

The prompt's beginning must not change from turn to turn, because only an equal beginning is found in the prefix cache. So

1. the billing line, which differs between sessions, is left out of the system text.
2. text is one string, whether the client sends it as a string or as blocks.
3. a system message keeps its place.
4. a tool with `defer_loading` is not in the list of tools. Its definition is written where a `tool_reference` names it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inflight.entrypoints.anthropic.protocol import (
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.generation_fields import JsonSchemaResponseFormat, SamplingFields
from inflight.entrypoints.openai.messages import (
    CalledFunction,
    ChatMessage,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from inflight.entrypoints.openai.messages import ToolChoice as ChatToolChoice
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.openai.thinking import Thoughts

_BILLING = "x-anthropic-billing-header:"


class Translation(NamedTuple):
    """
    Attributes:
        hidden_tools: names of tools that the chat template must not list, because the messages have their definitions.
        left_out: the tools that are ignored, as names for the answer's header.
    """

    chat: ChatCompletionRequest
    hidden_tools: frozenset[str]
    left_out: tuple[str, ...]


def to_chat(body: CountTokensRequest, default_kwargs: Mapping[str, Any] | None) -> Translation:
    """`default_kwargs`: the server's default variables of the chat template. The chat has no model name.

    Raises:
        FieldError: a block is in a message of a wrong role, or `tool_choice` has no name.
    """
    own: list[ToolDefinition] = []
    foreign: list[ToolDefinition] = []
    for tool in body.tools or ():
        (own if tool.type in (None, "custom") else foreign).append(tool)
    deferred = {tool.name: _tool(tool) for tool in own if tool.defer_loading}
    reader = _MessageReader(deferred)
    system = _system_text(body.system)
    messages = [_chat_message("system", system)] if system else []
    for i, message in enumerate(body.messages):
        messages += reader.read(message, f"messages[{i}]")
    last, config, choice = messages[-1], body.output_config, body.tool_choice
    wanted = config.format if config is not None and config.format is not None else body.output_format
    given: dict[str, Any] = {  # Any: the fields of a chat request
        "messages": messages,
        "tools": [_tool(tool) for tool in own if not tool.defer_loading] + [deferred[name] for name in reader.loaded],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": None if config is None else config.effort,
        "chat_template_kwargs": _thinking_kwargs(body, default_kwargs),
        "continue_final_message": last.role == "assistant" and bool(last.content) and not last.tool_calls,
        "response_format": None if wanted is None else _response_format(wanted.schema_),
    }
    if isinstance(body, MessagesRequest):
        given |= {name: getattr(body, name) for name in (*SamplingFields.model_fields, "stream")}
        given |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    chat = ChatCompletionRequest(**given)
    return Translation(chat, frozenset(reader.loaded), tuple(f"tools[] ({tool.type})" for tool in foreign))


class _MessageReader:
    """Makes chat messages of Anthropic's.

    Attributes:
        loaded: the deferred tools that the messages so far have named, as the keys of a dict, which keep their order.
    """

    def __init__(self, deferred: Mapping[str, Tool]) -> None:
        self.loaded: dict[str, None] = {}
        self._deferred = deferred

    def read(self, message: InputMessage, where: str) -> list[ChatMessage]:
        if isinstance(message.content, str):
            return [_chat_message(message.role, message.content)]
        _check_blocks(message.content, message.role, where)
        if message.role == "assistant":
            return [_assistant_message(message.content)]
        # Chat templates expect the results right behind the calls, so they come before the text of the same message.
        found = [self._result(block) for block in message.content if isinstance(block, ToolResultBlock)]
        texts = [block.text for block in message.content if isinstance(block, TextBlock)]
        return [*found, _chat_message(message.role, "\n".join(texts))] if texts or not found else found

    def _result(self, block: ToolResultBlock) -> ChatMessage:
        parts = block.content or ""
        if not isinstance(parts, str):
            parts = "\n".join(part.text if isinstance(part, TextBlock) else self._definition(part) for part in parts)
        return _chat_message("tool", f"Error: {parts}" if block.is_error else parts, tool_call_id=block.tool_use_id)

    def _definition(self, reference: ToolReferenceBlock) -> str:
        """The definition of a deferred tool in the form in which most templates list tools. Other tools are only named."""
        tool = self._deferred.get(reference.tool_name)
        if tool is None:
            return reference.tool_name
        self.loaded[reference.tool_name] = None
        return json.dumps(tool.model_dump(exclude_unset=True), ensure_ascii=False)


def _chat_message(role: str, content: str | None, **more: Any) -> ChatMessage:  # Any: further fields
    return ChatMessage(role=role, content=content, **more)


def _check_blocks(blocks: Sequence[ContentBlock], role: str, where: str) -> None:
    allowed = {
        "user": (TextBlock, ToolResultBlock),
        "system": (TextBlock,),
        "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    }[role]
    for i, block in enumerate(blocks):
        if not isinstance(block, allowed):
            place = f"{where}.content[{i}]"
            raise FieldError(place, f"{place}: a message of the role {role!r} has no blocks of the type {block.type!r}")


def _assistant_message(blocks: Sequence[ContentBlock]) -> ChatMessage:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    calls = [
        ToolCall(id=block.id, type="function", function=CalledFunction(name=block.name, arguments=block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return _chat_message(
        "assistant",
        "\n".join(texts) if texts or not calls else None,
        reasoning_content="\n\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _system_text(system: str | list[TextBlock] | None) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return "\n".join(text for text in map(_without_billing, texts) if text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING) else text


def _tool(tool: ToolDefinition) -> Tool:
    """With only the fields that the request gives, because a template writes all fields into the prompt."""
    given: dict[str, Any] = {"name": tool.name}  # Any: JSON
    if tool.description is not None:
        given["description"] = tool.description
    if tool.input_schema is not None:
        given["parameters"] = tool.input_schema
    if tool.strict:
        given["strict"] = True
    return Tool(type="function", function=FunctionDefinition(**given))


def _tool_choice(choice: ToolChoice) -> ChatToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise FieldError("tool_choice.name", "tool_choice.name: the type 'tool' needs the name of a tool")
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _thinking_kwargs(body: CountTokensRequest, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables with which templates switch thinking on and off. In Anthropic's API a request that does not say `thinking`
    wants none. Such a request leaves the variables that are set in `defaults` as they are."""
    if body.thinking is None:
        switches = {"enable_thinking": False, "thinking": False}
        return {name: value for name, value in switches.items() if name not in (defaults or {})}
    return dict.fromkeys(("enable_thinking", "thinking"), body.thinking.type != "disabled")


def thoughts_of_message(body: CountTokensRequest) -> Thoughts:
    """What the request says about thinking. Clients must give a budget to every model, also to one that does not think, so it
    is never refused."""
    thinking, config = body.thinking, body.output_config
    return Thoughts(
        budget=None if thinking is None else thinking.budget_tokens,
        effort=None if config is None else config.effort,
        is_on=None if thinking is None else thinking.type != "disabled",
        budget_field="thinking.budget_tokens",
        effort_field="output_config.effort",
        may_ignore_budget=True,
    )


def _response_format(schema: dict[str, Any]) -> JsonSchemaResponseFormat:
    return JsonSchemaResponseFormat.model_validate(
        {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    )
