"""Messages to the token ids of a prompt, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.messages import (
    ChatMessage,
    Tool,
    malformed_arguments,
    read_malformed_arguments,
    template_messages,
)
from inflight.entrypoints.openai.server import ApiServer
from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate


async def render_messages(
    server: ApiServer,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    *,
    documents: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    add_special_tokens: bool | None,
) -> list[int]:
    """The prompt's token ids. None is the default of each argument; `tools` are those of `plain_tools`.

    Raises:
        InvalidRequestError: the template refuses them, or a template of the request's own is not allowed.
    """
    engine = server.engine
    template = engine.chat_template if chat_template is None else _own_template(server, chat_template)
    if template is None:
        raise FieldError("messages", "chat needs a tokenizer, and the engine has none")
    continues = bool(continue_final_message)

    def render(plain: list[dict[str, Any]]) -> str:
        return template.render(
            plain,
            tools=tools,
            documents=documents,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs=chat_template_kwargs,
        )

    text = await asyncio.to_thread(lambda: _render_calls(render, template_messages(messages)))
    return await engine.encode(text, add_special_tokens=bool(add_special_tokens))


def _render_calls(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """Render `messages`. Arguments that are no JSON object are handed over as the text that they are, if the template writes it
    as it is, and else as an object: most templates write JSON of what they get."""
    malformed = malformed_arguments(messages)
    if malformed:
        with suppress(InvalidRequestError):  # a template that goes through the members
            text = render(messages)
            if all(arguments in text for arguments in malformed):
                return text
        read_malformed_arguments(messages)
    return render(messages)


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """As they were given: a template writes what is there. An empty list is none."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None


def _own_template(server: ApiServer, source: str) -> ChatTemplate:
    if not server.settings.enable_request_chat_template:
        raise FieldError("chat_template", "this server takes no chat_template in requests: leave it out")
    tokenizer = server.engine.tokenizer
    return ChatTemplate({"default": source}, None if tokenizer is None else tokenizer.special_tokens)
