"""The endpoints GET /v1/engine/live and POST /v1/engine/abort."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from fastapi import FastAPI, Request, Response
from pydantic import Field
from starlette.types import Send

from inflight.entrypoints.engine_api.live_feed import LiveFeed
from inflight.entrypoints.fields.strict_model import StrictModel
from inflight.entrypoints.http.bodies import Status
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.respond import ERRORS, add_post, in_time
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.sse import EventStream, WorkResponse
from inflight.entrypoints.json_lines import to_json
from inflight.interface.engine_view import EngineView

MIN_SECONDS = 0.1  # between two events
IDLE_SECONDS = 1.0  # after so long the states of the replicas are compared, also without a view
VIEW_SECONDS = 5.0  # for an engine to say which requests it has


class AbortRequest(StrictModel):
    """POST /v1/engine/abort"""

    request_id: str = Field(description="The id of a sequence, as /v1/engine/live shows it.", max_length=512)


def add_routes(app: FastAPI, server: ApiServer) -> None:
    engine = server.engine

    async def live() -> Response:
        """Events about the engines: a snapshot, then what has changed, at most ten a second. Counts and ids, never texts."""

        async def work(send: Send) -> Response | None:
            feed = LiveFeed(engine.engines)
            news = asyncio.Event()
            events = EventStream(send, server.settings.stream_keep_alive_interval)
            with ExitStack() as watches:
                for client, replica in zip(engine.engines, feed.replicas, strict=True):
                    watches.enter_context(client.views.watched(_both(replica.take, news)))
                async with events.kept_alive():
                    while not engine.is_draining:
                        if (event := feed.event()) is not None:
                            await events.send(b"data: " + to_json(event) + b"\n\n")
                        await asyncio.sleep(MIN_SECONDS)
                        await _wait(news, IDLE_SECONDS)
            await events.finish(b"")
            return None

        return WorkResponse(work)

    async def abort(body: AbortRequest, request: Request) -> Response:
        """End one sequence, of whichever client. Its client gets an error."""

        async def make() -> tuple[bytes, list[str]]:
            for client in engine.engines:
                views: list[EngineView] = []
                came = asyncio.Event()
                with client.views.watched(_both(views.append, came)):
                    await _wait(came, VIEW_SECONDS)  # in vain if the engine recovers, or a step hangs
                if views and body.request_id in views[-1].request_ids:
                    client.views.end_requests(body.request_id)
                    return to_json({"status": "ended"}), []
            raise ApiError(
                404, f"no request with the id {body.request_id!r} runs or waits", param="request_id", code="not_found"
            )

        return in_time(server, request, body, make, FieldNames(body, prompt="request_id"))

    app.add_api_route("/v1/engine/live", live, methods=["GET"], response_class=Response, responses=ERRORS)
    add_post(app, "/v1/engine/abort", abort, {"model": Status})


def _both(take: Callable[[EngineView], None], news: asyncio.Event) -> Callable[[EngineView], None]:
    """What takes a view and says that there is news."""

    def take_view(view: EngineView) -> None:
        take(view)
        news.set()

    return take_view


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
