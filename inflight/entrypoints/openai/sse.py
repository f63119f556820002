"""Answers as raw ASGI: work that ends when its client goes, and a stream of server-sent events under backpressure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class WorkResponse(Response):
    """Runs `work(send)`, which sends the answer; cancels it, and waits for its end, as soon as the client is gone.

    What `work` raises before it has sent anything becomes the answer by the app's error handlers.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(send))
        listener = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait((work, listener), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(listener)
            if not work.done():
                await _end(work)
        if not work.cancelled():
            work.result()


async def send_json(send: Send, body: bytes) -> None:
    """A whole answer with status 200."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def with_headers(send: Send, headers: Sequence[tuple[bytes, bytes]]) -> Send:
    """`send` with further headers in the answer."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_more if headers else send


class EventStream:
    """The status line goes with the first event: until then the answer can still be an error with a status of its own."""

    def __init__(self, send: Send) -> None:
        self.has_started = False
        self._send = send

    async def send(self, events: bytes) -> None:
        """Returns when the server takes more: a slow client holds its own stream up, and nothing else."""
        if not self.has_started:
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            self.has_started = True
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, events: bytes) -> None:
        await self.send(events)
        await self._send({"type": "http.response.body", "body": b""})


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
