"""Adds endpoints, and makes the response to one request: it runs within the deadline, and ends when the client leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import Send

from inflight.engine.serving.output_stream import OutputStream
from inflight.entrypoints.fields.strict_model import StrictModel
from inflight.entrypoints.http.bodies import ErrorBody
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.generation import send_events, submit, whole_answer
from inflight.entrypoints.http.presenter import AnswerTo, Presenter
from inflight.entrypoints.http.prompt_progress import prompt_progress
from inflight.entrypoints.http.server import ApiServer, answer_id, within_deadline
from inflight.entrypoints.http.sse import EventStream, WorkResponse
from inflight.entrypoints.http.validated import ValidatedRequest
from inflight.errors import InvalidRequestError, OverloadedError, TokenizerError

Responses = dict[int | str, dict[str, Any]]  # the OpenAPI descriptions of answers, by status


def error_responses(body: Any, overload: str = "503, with Retry-After") -> Responses:
    """`body`: the type of the JSON of an API's errors. `overload`: what an answer has if the queue is full."""
    return {
        "4XX": {"model": body, "description": "The request is wrong."},
        "5XX": {"model": body, "description": f"The queue is full ({overload}), or the server failed."},
    }


ERRORS = error_responses(ErrorBody)


def add_post(
    app: FastAPI, path: str, endpoint: Callable[..., Any], answer: dict[str, Any], errors: Responses = ERRORS
) -> None:
    """Add an endpoint that makes its `Response` itself. `answer`: the OpenAPI description of the answer that is no error."""
    app.add_api_route(path, endpoint, methods=["POST"], response_model=None, responses={200: answer, **errors})


def respond(
    server: ApiServer,
    request: Request,
    body: StrictModel,
    validate: Callable[[], Awaitable[ValidatedRequest]],
    presenter_type: type[Presenter],
    names: FieldNames,
) -> Response:
    """Returns a response that does all the work when it is sent, even rendering and tokenising. `WorkResponse` cancels the work
    if the client disconnects."""
    ignored = server.ignored_fields.take_out(body)

    async def work(send: Send) -> Response | None:
        async with begin(server, request, validate, presenter_type, names, ignored) as begun:
            streams, presenter, headers = begun.streams, begun.presenter, begun.headers
            if not begun.validated.presentation.stream:
                answer = await whole_answer(streams, presenter)
                await presenter.keep()
                return Response(answer, headers=headers, media_type="application/json")
            events = EventStream(send, server.settings.stream_keep_alive_interval, headers, presenter.media_type)
            async with AsyncExitStack() as beside:
                if begun.validated.presentation.return_progress:
                    telling = prompt_progress(server.engine.engines, streams[0], presenter, events)
                    await beside.enter_async_context(telling)
                await send_events(streams, presenter, events, names)
            return None

    return WorkResponse(work)


@dataclass
class Begun:
    """A request that the engine has.

    Attributes:
        headers: of the answer.
        goes_on: set it if the request shall not end with the answer. Then somebody else must abort the streams.
    """

    streams: list[OutputStream]
    presenter: Presenter
    validated: ValidatedRequest
    headers: dict[str, str]
    goes_on: bool = False


@asynccontextmanager
async def begin(
    server: ApiServer,
    request: Request,
    validate: Callable[[], Awaitable[ValidatedRequest]],
    presenter_type: type[Presenter],
    names: FieldNames,
    ignored: Sequence[str],
) -> AsyncIterator[Begun]:
    """Validate a request and start it. Behind the `with` block it is aborted, if it has not ended.

    Raises:
        ApiError: the request is wrong, also if the block raises an error that says so.
    """
    streams: list[OutputStream] = []
    goes_on = False
    try:
        with server.engine.accepted():  # if the queue is full, refuse before anything is tokenised
            async with within_deadline(request):
                validated = await validate()
                name = answer_id(request, presenter_type.id_prefix, validated.presentation.request_id)
                streams = await submit(server, request, validated, name)
        server.log_started(request, streams)
        presenter = presenter_type(AnswerTo(name, validated, server.fingerprint, server.engine.tokenizer))
        unenforced = [
            names.in_own_words(place.param, place.text) for stream in streams for place in stream.request.unenforced
        ]
        headers = server.ignored_fields.header([*ignored, *validated.left_out, *unenforced])
        begun = Begun(streams, presenter, validated, headers)
        yield begun
        goes_on = begun.goes_on
    except (InvalidRequestError, TokenizerError) as error:
        raise names.api_error(error) from error
    except OverloadedError:
        if not streams:
            server.metrics.request_refused("queue_full")
        raise
    finally:
        if not goes_on:
            for stream in streams:
                stream.abort()


def in_time(
    server: ApiServer,
    request: Request,
    body: StrictModel,
    make: Callable[[], Awaitable[tuple[bytes, Iterable[str]]]],
    names: FieldNames,
) -> Response:
    """Returns a response with the JSON that `make` returns, or an error if `make` takes longer than the request's deadline.
    Beside the JSON, `make` returns the names of the parts of the request that it ignores."""
    ignored = server.ignored_fields.take_out(body)

    async def work(_: Send) -> Response:
        try:
            async with within_deadline(request):
                answer, left_out = await make()
        except (InvalidRequestError, TokenizerError) as error:
            raise names.api_error(error) from error
        headers = server.ignored_fields.header([*ignored, *left_out])
        return Response(answer, headers=headers, media_type="application/json")

    return WorkResponse(work)


def streamed_or_not(whole: type, chunk: type) -> dict[str, Any]:
    """The OpenAPI description of an answer that may be a stream. FastAPI adds the schema of `whole` for application/json. The
    text of the description names the events of a stream."""
    return {
        "model": whole,
        "description": f"A {whole.__name__}; with stream, events of {chunk.__name__}, then [DONE].",
        # no schema, because OpenAPI 3.1 cannot describe events
        "content": {"text/event-stream": {}},
    }
