"""Turns the messages of a chat into the token ids of a prompt, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.messages import Tool, malformed_calls, read_arguments, template_messages
from inflight.entrypoints.openai.protocol import ChatTemplateFields
from inflight.entrypoints.openai.server import ApiServer
from inflight.errors import InvalidRequestError


async def render_messages(
    server: ApiServer,
    body: ChatTemplateFields,
    tools: list[dict[str, Any]] | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """Returns the prompt's token ids. `body` must have messages. `tools` is the result of `plain_tools`.

    Raises:
        InvalidRequestError: the template refuses the messages, or the engine has no tokenizer.
    """
    engine, template = server.engine, server.engine.chat_template
    if template is None:
        raise FieldError(
            "messages",
            "messages need a tokenizer, but the engine runs without one: send a prompt of token ids to /v1/completions",
        )
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    arguments: dict[str, Any] = {  # Any: JSON
        "tools": tools,
        "documents": body.documents,
        "add_generation_prompt": not continues if opens is None else opens,
        "continue_final_message": continues,
        "chat_template_kwargs": {
            **(server.settings.default_chat_template_kwargs or {}),
            **(chat_template_kwargs or {}),
        },
    }

    async def render(plain: list[dict[str, Any]]) -> str:
        return await asyncio.to_thread(lambda: template.render(plain, **arguments))

    text = await _render_calls(render, await asyncio.to_thread(template_messages, body.messages or ()))
    return await engine.encode(text, add_special_tokens=bool(body.add_special_tokens))


async def _render_calls(
    render: Callable[[list[dict[str, Any]]], Awaitable[str]], messages: list[dict[str, Any]]
) -> str:
    """Render `messages`. If the arguments of a call are not a JSON object, the template first gets them as text. Most templates
    convert arguments to JSON, and so write the text as a quoted string. If the rendered prompt does not contain the text
    unchanged, `messages` are rendered again, with an object that contains the readable part of the arguments."""

    def read_malformed() -> None:
        for function in malformed:
            function["arguments"] = read_arguments(function["arguments"])

    malformed = await asyncio.to_thread(malformed_calls, messages)
    if malformed:
        # if a template iterates over the members of arguments, it fails if they are text
        with suppress(InvalidRequestError):
            text = await render(messages)
            if all(function["arguments"] in text for function in malformed):
                return text
        await asyncio.to_thread(read_malformed)
    return await render(messages)


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools as JSON objects, or None if there are no tools. They contain only the fields that the request gave, because a
    template writes all fields into the prompt."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None
