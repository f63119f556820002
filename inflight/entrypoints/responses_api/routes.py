"""The endpoints of the Responses API: /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request, Response

from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.respond import add_post, in_time, respond, streamed_or_not
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.responses_api import bodies
from inflight.entrypoints.responses_api.conversation import validate_response
from inflight.entrypoints.responses_api.presenter import ResponsesPresenter
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.entrypoints.responses_api.tools import places_of_functions


def names_of(body: ResponsesRequest) -> FieldNames:
    return FieldNames(body, prompt="input", functions=places_of_functions(body.tools or ()))


def add_routes(app: FastAPI, server: ApiServer) -> None:
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return respond(
            server, request, body, partial(validate_response, server, body), ResponsesPresenter, names_of(body)
        )

    async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
        """The number of tokens of the prompt that the request would have."""

        async def make() -> tuple[bytes, tuple[str, ...]]:
            validated = await validate_response(server, body)
            num_tokens = len(validated.prompts[0].token_ids)
            count: bodies.InputTokens = {"object": "response.input_tokens", "input_tokens": num_tokens}
            return to_json(count), validated.left_out

        return in_time(server, request, body, make, names_of(body))

    add_post(app, "/v1/responses", create_response, streamed_or_not(bodies.Response, bodies.ResponseEvent))
    add_post(app, "/v1/responses/input_tokens", count_input_tokens, {"model": bodies.InputTokens})
