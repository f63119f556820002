"""The endpoints of OpenAI's API: /v1/chat/completions, /v1/completions, and those of models and tokens."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request, Response

from inflight.entrypoints.http.chat import validate_chat
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.respond import add_post, respond, streamed_or_not
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.text_prompts import validate_text
from inflight.entrypoints.http.validated import ValidatedRequest
from inflight.entrypoints.openai.bodies import ChatCompletion, ChatCompletionChunk, Completion
from inflight.entrypoints.openai.chat import chat_names, read_chat
from inflight.entrypoints.openai.chat_presenter import ChatPresenter
from inflight.entrypoints.openai.completion_presenter import CompletionPresenter
from inflight.entrypoints.openai.completions import read_completion
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from inflight.entrypoints.openai.utility_routes import add_model_routes, add_token_routes


def add_routes(app: FastAPI, server: ApiServer) -> None:
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        validate = partial(validate_chat, server, partial(read_chat, server, body))
        return respond(server, request, body, validate, ChatPresenter, chat_names(body))

    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        async def validate() -> ValidatedRequest:
            return await validate_text(server, read_completion(server, body))

        return respond(server, request, body, validate, CompletionPresenter, FieldNames(body, prompt="prompt"))

    add_post(app, "/v1/chat/completions", create_chat_completion, streamed_or_not(ChatCompletion, ChatCompletionChunk))
    add_post(app, "/v1/completions", create_completion, streamed_or_not(Completion, Completion))
    add_model_routes(app, server)
    add_token_routes(app, server)
