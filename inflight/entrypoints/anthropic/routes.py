"""The endpoints of Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from inflight.entrypoints.anthropic.answers import AnthropicErrorBody, Message, TokenCount
from inflight.entrypoints.anthropic.presenter import MessagesPresenter
from inflight.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from inflight.entrypoints.anthropic.translation import thoughts_of_message, to_chat
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.openai.chat import validate_chat
from inflight.entrypoints.openai.errors import ApiError, FieldError
from inflight.entrypoints.openai.generation_routes import add_post, error_responses, in_time, respond
from inflight.entrypoints.openai.server import ApiServer
from inflight.entrypoints.openai.validated import ValidatedRequest
from inflight.errors import ContextLengthExceededError

_ERRORS = error_responses(AnthropicErrorBody)
_STREAMED = "A Message; with stream, the events message_start, content_block_start, ..., message_stop."


def add_messages_routes(app: FastAPI, server: ApiServer) -> None:
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        return respond(server, request, body, partial(_validate, server, body), MessagesPresenter)

    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        async def make() -> tuple[bytes, tuple[str, ...]]:
            validated = await _validate(server, body)
            count: TokenCount = {"input_tokens": len(validated.prompts[0].token_ids)}
            return to_json(count), validated.left_out

        return in_time(server, request, body, make)

    # no schema of a stream, because OpenAPI 3.1 cannot describe events
    streamed = {"model": Message, "description": _STREAMED, "content": {"text/event-stream": {}}}
    add_post(app, "/v1/messages", create_message, streamed, _ERRORS)
    add_post(app, "/v1/messages/count_tokens", count_tokens, {"model": TokenCount}, _ERRORS)


async def _validate(server: ApiServer, body: CountTokensRequest) -> ValidatedRequest:
    """
    Raises:
        ApiError, InvalidRequestError: the request is wrong.
        TokenizerError: the model has no chat template.
    """
    # Anthropic's clients ask for names like claude-opus-5-5. There is one model here, so any name can only mean this one.
    is_strict = server.settings.strict_model_names
    model = server.check_model(body.model) if is_strict else body.model or server.model_names[0]
    try:
        chat, hidden_tools, shows_thoughts, left_out = await asyncio.to_thread(
            to_chat, body, server.settings.default_chat_template_kwargs
        )
    except ValidationError as error:  # more messages or calls than a chat may have
        first = error.errors(include_url=False, include_input=False)[0]
        raise FieldError("messages", f"messages: too many {first['loc'][-1]}: {first['msg']}") from None
    try:
        validated = await validate_chat(server, chat, hidden_tools=hidden_tools, thoughts=thoughts_of_message(body))
    except ContextLengthExceededError as error:
        raise _too_long(server, error.num_tokens) from error
    num_tokens = len(validated.prompts[0].token_ids)
    if num_tokens >= server.engine.model.max_model_len and isinstance(body, MessagesRequest):
        raise _too_long(server, num_tokens)
    presentation = replace(
        validated.presentation, model=model, reasoning=shows_thoughts and validated.presentation.reasoning
    )
    return replace(validated, presentation=presentation, left_out=(*left_out, *validated.left_out))


def _too_long(server: ApiServer, num_tokens: int) -> ApiError:
    """In Anthropic's words, which clients look for, to shorten the conversation. One token of the context is for the answer."""
    longest = server.engine.model.max_model_len - 1
    return ApiError(400, f"prompt is too long: {num_tokens} tokens > {longest} maximum", code="context_length_exceeded")
