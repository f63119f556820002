"""Messages to the token ids of a prompt, off the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.messages import ChatMessage, Tool, template_messages
from inflight.entrypoints.openai.server import ApiServer


async def render_messages(
    server: ApiServer,
    messages: list[ChatMessage],
    tools: list[Tool] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    add_special_tokens: bool | None,
) -> list[int]:
    """The prompt's token ids. None is the default of each argument.

    Raises:
        InvalidRequestError: the template refuses them, or a template of the request's own is not allowed.
        TokenizerError: the request's own template is no valid Jinja, or needs too much time or memory.
    """
    engine = server.engine
    continues = bool(continue_final_message)

    def arguments() -> dict[str, Any]:  # Any: JSON
        return {
            "messages": template_messages(messages),
            "tools": plain_tools(tools),
            "add_generation_prompt": not continues if add_generation_prompt is None else add_generation_prompt,
            "continue_final_message": continues,
            "chat_template_kwargs": chat_template_kwargs,
        }

    template = engine.chat_template
    if chat_template is not None:
        if server.templates is None:
            raise FieldError("chat_template", "this server takes no chat_template in requests: leave it out")
        special_tokens = {} if engine.tokenizer is None else engine.tokenizer.special_tokens
        text = await server.templates.render(chat_template, special_tokens, **await asyncio.to_thread(arguments))
    elif template is None:
        raise FieldError("messages", "chat needs a tokenizer, and the engine has none")
    else:
        text = await asyncio.to_thread(lambda: template.render(**arguments()))
    return await engine.encode(text, add_special_tokens=bool(add_special_tokens))


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """As they were given: a template writes what is there. An empty list is none."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None
