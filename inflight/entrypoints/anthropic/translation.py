"""`read_messages`: reads a request to /v1/messages as a `ChatRequest`.

The prompt's beginning must not change from turn to turn, because only an equal beginning is found in the prefix cache. So

1. the billing line, which differs between sessions, is left out of the system text.
2. text is one string, whether the client sends it as a string or as blocks.
3. a system message keeps its place.
4. a tool with `defer_loading` is not in the list of tools. Its definition is written where a `tool_reference` names it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inflight.entrypoints.anthropic.message_reader import MessageReader, too_many, tool_of
from inflight.entrypoints.anthropic.protocol import CountTokensRequest, ToolChoice
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.messages import MAX_MESSAGES, MAX_TOOLS, chat_message
from inflight.entrypoints.fields.offered_tools import tool_choice_of
from inflight.entrypoints.fields.parameters import sampling_params
from inflight.entrypoints.http.chat_request import ChatPrompt, ChatRequest
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.thinking import Thoughts, thoughts_of
from inflight.entrypoints.http.validated import Presentation
from inflight.parsers.tool_choice import ToolChoice as ChatToolChoice

_THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates


def read_messages(server: ApiServer, body: CountTokensRequest) -> ChatRequest:
    """
    Raises:
        FieldError: the client asks about a medium that the model cannot read, `tool_choice` has no name, or there are too many
            messages.
        ApiError, InvalidRequestError: the request is wrong.
    """
    # Clients of this API ask for names like claude-opus-5-5. There is one model here, so any name can only mean this one.
    is_strict = server.settings.strict_model_names
    model = server.check_model(body.model) if is_strict else body.model or server.model_names[0]
    defaults = server.settings.default_chat_template_kwargs
    given = body.tools or ()
    listed = [tool for tool in given if tool.is_listed]
    deferred = {tool.name: tool_of(tool) for tool in given if tool.is_own and tool.defer_loading}
    images = server.new_images()
    reader = MessageReader(body.messages, [tool.name for tool in listed], deferred, images)
    system = reader.system_text(body.system)
    messages = [chat_message("system", system)] if system else []
    messages += reader.read()
    places = [*(["system"] if system else ()), *reader.places]
    if len(messages) > MAX_MESSAGES:
        raise FieldError("messages", f"messages: too many messages: {too_many(MAX_MESSAGES, len(messages))}")
    # the definitions of older ones stay in the messages
    newest_first = list(reader.loaded.items())[::-1]
    loaded = dict(newest_first[: MAX_TOOLS - len(listed)][::-1])
    left_out = [f"tools[] ({tool.type})" for tool in given if not tool.is_own] + reader.left_out
    if len(loaded) < len(reader.loaded):
        left_out.append("messages[].content[] (tool_addition)")
    last = messages[-1]
    choice = body.tool_choice
    thoughts = thoughts_of_message(body)
    tools = [*map(tool_of, listed), *loaded.values()]
    return ChatRequest(
        prompt=ChatPrompt(
            messages=messages,
            places=places,
            images=images.sources,
            tools=tools,
            continue_final_message=last["role"] == "assistant"
            and bool(last.get("content"))
            and "tool_calls" not in last,
            variables={**_switches(thoughts, defaults), **(body.chat_template_kwargs or {})},
        ),
        hidden_tools=frozenset(loaded),
        tool_choice=tool_choice_of(tools, None if choice is None else _tool_choice(choice)),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        params=sampling_params(body, server.engine.default_params, max_tokens=body.most_tokens),
        thoughts=thoughts,
        presentation=Presentation(
            model=model,
            stream=body.is_stream,
            reasoning=_shows_thoughts(thoughts, defaults) and not body.hides_reasoning,
        ),
        left_out=tuple(left_out),
    )


def _tool_choice(choice: ToolChoice) -> ChatToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise FieldError("tool_choice.name", "tool_choice.name: the type 'tool' needs the name of a tool")
        return {"name": choice.name}
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
