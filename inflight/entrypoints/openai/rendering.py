"""Turns the messages of a chat into the token ids of a prompt, off the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.messages import AnyTool, template_messages
from inflight.entrypoints.openai.protocol import ChatTemplateFields
from inflight.entrypoints.openai.server import ApiServer


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

    def render() -> str:
        return template.render(template_messages(body.messages or ()), **arguments)

    text = await asyncio.to_thread(render)
    return await engine.encode(text, add_special_tokens=bool(body.add_special_tokens))


def plain_tools(tools: list[AnyTool] | None) -> list[dict[str, Any]] | None:
    """The tools as JSON objects, or None if there are no tools. They contain only the fields that the request gave, because a
    template writes all fields into the prompt."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None
