"""`to_chat`: turns a request to /v1/messages into the chat request that means the same.

The prompt's beginning must not change from turn to turn, because only an equal beginning is found in the prefix cache. So

1. the billing line, which differs between sessions, is left out of the system text.
2. text is one string, whether the client sends it as a string or as blocks.
3. a system message keeps its place.
4. a tool with `defer_loading` is not in the list of tools. Its definition is written where a `tool_reference` names it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from inflight.entrypoints.anthropic.blocks import ToolDefinition
from inflight.entrypoints.anthropic.message_reader import MessageReader, chat_message, chat_tool
from inflight.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest, ToolChoice
from inflight.entrypoints.openai.constraint_fields import ConstraintFields
from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.messages import MAX_TOOLS, NamedFunction, NamedToolChoice
from inflight.entrypoints.openai.messages import ToolChoice as ChatToolChoice
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.openai.sampling_fields import SamplingFields
from inflight.entrypoints.openai.thinking import Thoughts, thoughts_of

_THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates


class Translation(NamedTuple):
    """
    Attributes:
        hidden_tools: names of tools that the chat template must not list, because the messages have their definitions.
        shows_thoughts: whether the answer has blocks with thoughts, if the model thinks.
        left_out: the tools and blocks that are ignored, as names for the answer's header.
    """

    chat: ChatCompletionRequest
    hidden_tools: frozenset[str]
    shows_thoughts: bool
    left_out: tuple[str, ...]


def to_chat(body: CountTokensRequest, default_kwargs: Mapping[str, Any] | None) -> Translation:
    """`default_kwargs`: the server's default variables of the chat template. The chat has no model name.

    Raises:
        FieldError: the client asks about a medium, such as an image, or `tool_choice` has no name.
    """
    own: list[ToolDefinition] = []
    foreign: list[ToolDefinition] = []
    for tool in body.tools or ():
        (own if tool.type in (None, "custom") else foreign).append(tool)
    listed = [tool for tool in own if not tool.defer_loading]
    deferred = {tool.name: chat_tool(tool) for tool in own if tool.defer_loading}
    reader = MessageReader(body.messages, [tool.name for tool in listed], deferred)
    system = reader.system_text(body.system)
    messages = [chat_message("system", system)] if system else []
    messages += reader.read()
    # the definitions of older ones stay in the messages
    loaded = dict(list(reader.loaded.items())[::-1][: MAX_TOOLS - len(listed)][::-1])
    left_out = [f"tools[] ({tool.type})" for tool in foreign] + reader.left_out
    if len(loaded) < len(reader.loaded):
        left_out.append("messages[].content[] (tool_addition)")
    last, choice, thoughts = messages[-1], body.tool_choice, thoughts_of_message(body)
    given: dict[str, Any] = {  # Any: the fields of a chat request
        "messages": messages,
        "tools": [*map(chat_tool, listed), *loaded.values()],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "continue_final_message": last.role == "assistant" and bool(last.content) and not last.tool_calls,
        **{name: getattr(body, name) for name in ConstraintFields.model_fields},
        "chat_template_kwargs": {**_switches(thoughts, default_kwargs), **(body.chat_template_kwargs or {})},
    }
    if isinstance(body, MessagesRequest):
        given |= {name: getattr(body, name) for name in (*SamplingFields.model_fields, "stream")}
        given["max_completion_tokens"] = body.max_tokens
    chat = ChatCompletionRequest(**given)
    return Translation(chat, frozenset(loaded), _shows_thoughts(thoughts, default_kwargs), tuple(left_out))


def _tool_choice(choice: ToolChoice) -> ChatToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise FieldError("tool_choice.name", "tool_choice.name: the type 'tool' needs the name of a tool")
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _switches(thoughts: Thoughts, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables with which templates switch thinking on and off. In Anthropic's API a request that does not say whether the
    model is to think wants no thoughts. Such a request leaves the variables that are set in `defaults` as they are."""
    if thoughts.is_on is None:
        return {name: False for name in _THINKING_SWITCHES if name not in (defaults or {})}
    return dict.fromkeys(_THINKING_SWITCHES, thoughts.is_on)


def _shows_thoughts(thoughts: Thoughts, defaults: Mapping[str, Any] | None) -> bool:
    """Some models think although the request has not asked for it: their template has no switch, or they ignore it. A client
    that has not asked for thoughts expects the text in the first block."""
    if thoughts.is_on is None:
        return any((defaults or {}).get(name) for name in _THINKING_SWITCHES)
    return thoughts.is_on


def thoughts_of_message(body: CountTokensRequest) -> Thoughts:
    """What the request says about thinking. Clients of Anthropic's API must give a budget to every model, also to one that does
    not think, so it is never refused.

    Raises:
        FieldError: a value is wrong, or two fields contradict each other.
    """
    thoughts = thoughts_of(body)
    return replace(thoughts, may_ignore_budget=thoughts.budget_field == "thinking.budget_tokens")
