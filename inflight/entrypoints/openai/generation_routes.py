"""The endpoints that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import Send

from inflight.entrypoints.openai.chat import validate_chat
from inflight.entrypoints.openai.chat_presenter import ChatPresenter
from inflight.entrypoints.openai.completion_presenter import CompletionPresenter
from inflight.entrypoints.openai.completions import validate_completion
from inflight.entrypoints.openai.deadline import within_deadline
from inflight.entrypoints.openai.errors import ErrorBody, to_api_error
from inflight.entrypoints.openai.generation import answer, submit
from inflight.entrypoints.openai.model import StrictModel
from inflight.entrypoints.openai.named_field import named_field
from inflight.entrypoints.openai.presenter import Presenter
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from inflight.entrypoints.openai.responses import ChatCompletion, ChatCompletionChunk, Completion
from inflight.entrypoints.openai.server import ApiServer, answer_id, arrival_time, trace_headers
from inflight.entrypoints.openai.sse import WorkResponse, with_headers
from inflight.entrypoints.openai.validated import ValidatedRequest
from inflight.errors import InvalidRequestError, OverloadedError, TokenizerError

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong."},
    "5XX": {"model": ErrorBody, "description": "The queue is full (503, with Retry-After), or the server failed."},
}


def add_generation_routes(app: FastAPI, server: ApiServer) -> None:
    engine = server.engine

    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        def present(validated: ValidatedRequest) -> Presenter:
            name = answer_id(request, "chatcmpl")
            return ChatPresenter(name, validated.presentation, server.fingerprint, engine.tokenizer)

        ignored = server.ignored_fields.take_out(body)
        validate = partial(validate_chat, server, body)
        return _respond(server, request, body, validate, present, "messages", ignored)

    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        def present(validated: ValidatedRequest) -> Presenter:
            name, prompts = answer_id(request, "cmpl"), validated.prompts
            return CompletionPresenter(name, validated.presentation, server.fingerprint, engine.tokenizer, prompts)

        ignored = server.ignored_fields.take_out(body)
        validate = partial(validate_completion, server, body)
        return _respond(server, request, body, validate, present, "prompt", ignored)

    app.add_api_route(
        "/v1/chat/completions",
        create_chat_completion,
        methods=["POST"],
        response_model=None,
        responses={200: _streamed_or_not(ChatCompletion, ChatCompletionChunk), **ERRORS},
    )
    app.add_api_route(
        "/v1/completions",
        create_completion,
        methods=["POST"],
        response_model=None,
        responses={200: _streamed_or_not(Completion, Completion), **ERRORS},
    )


def _respond(
    server: ApiServer,
    request: Request,
    body: StrictModel,
    validate: Callable[[], Awaitable[ValidatedRequest]],
    present: Callable[[ValidatedRequest], Presenter],
    prompt_field: str,
    ignored: list[str],
) -> Response:
    """All work happens inside the response, where a disconnect of the client is seen: rendering and tokenising too.

    Args:
        prompt_field: the field that the prompt is made of.
        ignored: unknown fields; the answer's header names them, and the parts of schemas that cannot be enforced.
    """

    async def generate(send: Send) -> None:
        arrival, timeout = arrival_time(request), server.settings.request_timeout
        try:
            # a full queue refuses at once, before anything is tokenised
            with server.engine.accepted():
                async with within_deadline(arrival, timeout):
                    validated = await validate()
                    presenter = present(validated)
                    streams = await submit(
                        server.engine,
                        validated,
                        presenter.id,
                        arrival_time=arrival,
                        timeout=timeout,
                        trace_headers=trace_headers(request),
                    )
        except OverloadedError:
            if server.metrics is not None:
                server.metrics.request_refused("queue_full")
            raise
        server.log_started(request, streams)
        unenforced = [place for stream in streams for place in stream.request.unenforced]
        send = with_headers(send, server.ignored_fields.header([*ignored, *unenforced]))
        await answer(
            streams,
            presenter,
            send,
            as_events=validated.presentation.stream,
            keep_alive=server.settings.stream_keep_alive_interval,
        )

    async def work(send: Send) -> None:
        try:
            await generate(send)
        except (InvalidRequestError, TokenizerError) as error:
            raise to_api_error(error, named_field(error, body, prompt_field)) from error

    return WorkResponse(work)


def _streamed_or_not(whole: type, chunk: type) -> dict[str, Any]:
    """FastAPI adds the model's schema to application/json; events are described in words."""
    return {
        "model": whole,
        "description": f"A {whole.__name__}; with stream, events of {chunk.__name__}, then [DONE].",
        # without a schema: it would be of the events, which OpenAPI 3.1 has no words for
        "content": {"text/event-stream": {}},
    }
