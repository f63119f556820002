"""Answers as raw ASGI: work that ends when its client goes, and a stream of server-sent events under backpressure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
_COMMENT = b": keep-alive\n\n"


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
    """`send` that adds these headers to the answer."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_more if headers else send


class EventStream:
    """The status line is sent with the first event: until then the answer can still be an error with its own status.

    Args:
        keep_alive: seconds without an event after which a comment is sent, so that no proxy closes a stream that waits in
            the queue. Clients ignore comments (HTML, section 9.2.6). The first comment sends the status 200. None: no
            comments.
    """

    def __init__(self, send: Send, keep_alive: float | None = None) -> None:
        self.has_started = False
        self._send = send
        self._keep_alive = keep_alive
        self._sent_at = time.monotonic()
        self._lock = asyncio.Lock()  # one writer at a time: events or a comment

    async def send(self, events: bytes) -> None:
        """Returns when the server takes more: a slow client holds its own stream up, and nothing else."""
        async with self._lock:
            if not self.has_started:
                await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                self.has_started = True
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self._sent_at = time.monotonic()

    async def finish(self, events: bytes) -> None:
        await self.send(events)
        await self._send({"type": "http.response.body", "body": b""})

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send comments while the body of the `with` waits for events. `finish` comes after it."""
        if self._keep_alive is None:
            yield
            return
        ticking = asyncio.ensure_future(self._tick(self._keep_alive))
        try:
            yield
        finally:
            await _end(ticking)

    async def _tick(self, interval: float) -> None:
        while True:
            silent = time.monotonic() - self._sent_at
            if silent < interval:
                await asyncio.sleep(interval - silent)
            else:
                await self.send(_COMMENT)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
