"""The endpoints of the Responses API: /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json
from starlette.types import Send

from inflight.entrypoints.openai.errors import named_field, to_api_error
from inflight.entrypoints.openai.generation_routes import ERRORS, respond, streamed_or_not
from inflight.entrypoints.openai.server import ApiServer, within_deadline
from inflight.entrypoints.openai.sse import WorkResponse
from inflight.entrypoints.responses_api import bodies
from inflight.entrypoints.responses_api.conversation import validate_response
from inflight.entrypoints.responses_api.presenter import ResponsesPresenter
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.errors import InvalidRequestError, TokenizerError


def add_response_routes(app: FastAPI, server: ApiServer) -> None:
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return respond(server, request, body, partial(validate_response, server, body), ResponsesPresenter)

    async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
        """The number of tokens of the prompt that the request would have."""
        headers = server.ignored_fields.header(server.ignored_fields.take_out(body))

        async def work(_: Send) -> Response:
            try:
                async with within_deadline(request):
                    validated = await validate_response(server, body)
            except (InvalidRequestError, TokenizerError) as error:
                raise to_api_error(error, named_field(error, body)) from error
            count: bodies.InputTokens = {
                "object": "response.input_tokens",
                "input_tokens": len(validated.prompts[0].token_ids),
            }
            return Response(to_json(count), headers=headers, media_type="application/json")

        return WorkResponse(work)

    made: dict[int | str, dict[str, Any]] = {200: streamed_or_not(bodies.Response, bodies.ResponseEvent), **ERRORS}
    counted: dict[int | str, dict[str, Any]] = {200: {"model": bodies.InputTokens}, **ERRORS}
    for path, endpoint, responses in (("", create_response, made), ("/input_tokens", count_input_tokens, counted)):
        app.add_api_route(f"/v1/responses{path}", endpoint, methods=["POST"], response_model=None, responses=responses)
