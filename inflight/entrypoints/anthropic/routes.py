"""The endpoints of Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request, Response

from inflight.entrypoints.anthropic.bodies import AnthropicErrorBody, Message, TokenCount
from inflight.entrypoints.anthropic.presenter import MessagesPresenter
from inflight.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from inflight.entrypoints.anthropic.translation import read_messages
from inflight.entrypoints.http.chat import validate_chat
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.respond import add_post, error_responses, in_time, respond
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.validated import ValidatedRequest
from inflight.entrypoints.json_lines import to_json
from inflight.errors import ContextLengthExceededError

_ERRORS = error_responses(AnthropicErrorBody)
_STREAMED = "A Message; with stream, the events message_start, content_block_start, ..., message_stop."


def add_routes(app: FastAPI, server: ApiServer) -> None:
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        return respond(server, request, body, partial(_validate, server, body), MessagesPresenter, names_of(body))

    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        async def make() -> tuple[bytes, tuple[str, ...]]:
            validated = await _validate(server, body)
            count: TokenCount = {"input_tokens": len(validated.prompts[0].token_ids)}
            return to_json(count), validated.left_out

        return in_time(server, request, body, make, names_of(body))

    # no schema of a stream, because OpenAPI 3.1 cannot describe events
    streamed = {"model": Message, "description": _STREAMED, "content": {"text/event-stream": {}}}
    add_post(app, "/v1/messages", create_message, streamed, _ERRORS)
    add_post(app, "/v1/messages/count_tokens", count_tokens, {"model": TokenCount}, _ERRORS)


def names_of(body: CountTokensRequest) -> FieldNames:
    listed = [f"tools[{i}]" for i, tool in enumerate(body.tools or ()) if tool.is_listed]
    return FieldNames(body, functions=listed)


async def _validate(server: ApiServer, body: CountTokensRequest) -> ValidatedRequest:
    """
    Raises:
        ApiError, InvalidRequestError: the request is wrong.
        TokenizerError: the model has no chat template.
    """
    try:
        validated = await validate_chat(server, partial(read_messages, server, body))
    except ContextLengthExceededError as error:
        raise _too_long(server, error.num_tokens) from error
    num_tokens = len(validated.prompts[0].token_ids)
    if num_tokens >= server.engine.model.max_model_len and isinstance(body, MessagesRequest):
        raise _too_long(server, num_tokens)
    return validated


def _too_long(server: ApiServer, num_tokens: int) -> ApiError:
    """In Anthropic's words, which clients look for, to shorten the conversation. One token of the context is for the answer."""
    longest = server.engine.model.max_model_len - 1
    return ApiError(400, f"prompt is too long: {num_tokens} tokens > {longest} maximum", code="context_length_exceeded")
