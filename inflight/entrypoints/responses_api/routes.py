"""The endpoints of the Responses API: /v1/responses, /v1/responses/input_tokens, and those of stored responses."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request, Response
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Send

from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.respond import ERRORS, add_post, begin, in_time, respond, streamed_or_not
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.sse import WorkResponse
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.response_store import reading
from inflight.entrypoints.response_store.responses import StoredResponses
from inflight.entrypoints.responses_api import bodies
from inflight.entrypoints.responses_api.background import BackgroundResponses
from inflight.entrypoints.responses_api.conversation import ValidatedResponse, validate_response
from inflight.entrypoints.responses_api.presenter import ResponsesPresenter
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.entrypoints.responses_api.tools import places_of_functions

PATH = "/v1/responses"


class _ResponseId(Convertor[str]):
    """The id of a stored response in a path. `input_tokens` is none, but an endpoint of its own."""

    regex = "(?!input_tokens$)[^/]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("response", _ResponseId())


def names_of(body: ResponsesRequest) -> FieldNames:
    return FieldNames(body, prompt="input", functions=places_of_functions(body.tools or ()))


def add_routes(app: FastAPI, server: ApiServer) -> None:
    responses = StoredResponses(server.settings)
    background = BackgroundResponses(responses, server.beside)

    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        validate = partial(validate_response, server, body, responses)
        if body.background:
            return _in_background(server, request, body, background, responses)
        return respond(server, request, body, validate, ResponsesPresenter, names_of(body))

    async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
        """The number of tokens of the prompt that the request would have."""

        async def make() -> tuple[bytes, tuple[str, ...]]:
            validated = await validate_response(server, body, responses)
            num_tokens = len(validated.prompts[0].token_ids)
            count: bodies.InputTokens = {"object": "response.input_tokens", "input_tokens": num_tokens}
            return to_json(count), validated.left_out

        return in_time(server, request, body, make, names_of(body))

    add_post(app, PATH, create_response, streamed_or_not(bodies.Response, bodies.ResponseEvent))
    add_post(app, f"{PATH}/input_tokens", count_input_tokens, {"model": bodies.InputTokens})
    _add_stored(app, server, responses)


def _add_stored(app: FastAPI, server: ApiServer, responses: StoredResponses) -> None:
    async def read_response(response_id: str, request: Request) -> Response:
        """A stored response. With stream=true the events of one in the background, from the one after starting_after on."""
        keep_alive = server.settings.stream_keep_alive_interval
        return await reading.read(responses, response_id, request.query_params, keep_alive)

    async def list_input_items(response_id: str, request: Request) -> Response:
        """The items that the model has read."""
        return await reading.list_input(responses, response_id, request.query_params)

    async def delete_response(response_id: str) -> Response:
        """Remove a stored response."""
        return await reading.delete(responses, response_id)

    async def cancel_response(response_id: str) -> Response:
        """End a response in the background."""
        return await reading.cancel(responses, response_id)

    one = f"{PATH}/{{response_id:response}}"
    number = {"type": "integer", "minimum": 0}
    text = {"type": "string"}
    flag = {"type": "boolean"}
    order = {"type": "string", "enum": ["asc", "desc"]}
    listed = {"type": "integer", "minimum": 1, "maximum": reading.MAX_LISTED}
    streamed = streamed_or_not(bodies.Response, bodies.ResponseEvent)
    for method, path, endpoint, answer, query in (
        ("GET", one, read_response, streamed, {"stream": flag, "starting_after": number}),
        ("DELETE", one, delete_response, {"model": bodies.DeletedResponse}, {}),
        ("POST", f"{one}/cancel", cancel_response, {"model": bodies.Response}, {}),
        (
            "GET",
            f"{one}/input_items",
            list_input_items,
            {"model": bodies.InputItemList},
            {"order": order, "after": text, "limit": listed},
        ),
    ):
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            responses={200: answer, **ERRORS},
            openapi_extra={"parameters": [{"name": name, "in": "query", "schema": of} for name, of in query.items()]},
        )


def _in_background(
    server: ApiServer,
    request: Request,
    body: ResponsesRequest,
    background: BackgroundResponses,
    responses: StoredResponses,
) -> Response:
    """The answer comes as soon as the response is queued, or is a stream of its events."""
    ignored = server.ignored_fields.take_out(body)
    names = names_of(body)
    validate = partial(validate_response, server, body, responses)

    async def work(_: Send) -> Response:
        async with begin(server, request, validate, ResponsesPresenter, names, ignored) as begun:
            assert isinstance(begun.validated, ValidatedResponse) and begun.validated.kept is not None
            assert isinstance(begun.presenter, ResponsesPresenter)
            await background.start(begun, begun.validated.kept, names)
            headers = begun.headers
            if not begun.validated.presentation.stream:
                queued = begun.presenter.response("queued")
                return Response(queued, headers=headers, media_type="application/json")
            keep_alive = server.settings.stream_keep_alive_interval
            found = await reading.find(responses, begun.presenter.id)
            return reading.follow(responses, found, first=0, keep_alive=keep_alive, headers=headers)

    return WorkResponse(work)
