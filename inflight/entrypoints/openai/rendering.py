"""Messages to the token ids of a prompt, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
    """The prompt's token ids. If an argument is None, its default holds; `tools` is what `plain_tools` returns.

    Raises:
        InvalidRequestError: the template refuses them, or a template of the request's own is not allowed.
        TokenizerError: the request's own template is no valid Jinja, or needs too much time or memory.
    """
    engine = server.engine
    continues = bool(continue_final_message)

    arguments: dict[str, Any] = {  # Any: JSON
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": not continues if add_generation_prompt is None else add_generation_prompt,
        "continue_final_message": continues,
        "chat_template_kwargs": {
            **(server.settings.default_chat_template_kwargs or {}),
            **(chat_template_kwargs or {}),
        },
    }
    template, templates = engine.chat_template, server.templates
    special_tokens = {} if engine.tokenizer is None else engine.tokenizer.special_tokens

    async def render(plain: list[dict[str, Any]]) -> str:
        if chat_template is not None:
            if templates is None:
                raise FieldError("chat_template", "this server takes no chat_template in requests: leave it out")
            return await templates.render(chat_template, special_tokens, messages=plain, **arguments)
        if template is None:
            raise FieldError("messages", "chat needs a tokenizer, and the engine has none")
        return await asyncio.to_thread(lambda: template.render(plain, **arguments))

    text = await _render_calls(render, await asyncio.to_thread(template_messages, messages))
    return await engine.encode(text, add_special_tokens=bool(add_special_tokens))


async def _render_calls(
    render: Callable[[list[dict[str, Any]]], Awaitable[str]], messages: list[dict[str, Any]]
) -> str:
    """Render `messages`. If arguments are no JSON object, the template gets them as text if it writes this text unchanged;
    otherwise it gets an object. Most templates convert to JSON what they get, so text would become a quoted string."""
    malformed = await asyncio.to_thread(malformed_arguments, messages)
    if malformed:
        with suppress(
            InvalidRequestError
        ):  # the template may iterate over the members of the arguments, and fails on text
            text = await render(messages)
            if all(arguments in text for arguments in malformed):
                return text
        await asyncio.to_thread(read_malformed_arguments, messages)
    return await render(messages)


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """As they were given: a template writes what is there. An empty list is none."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None
