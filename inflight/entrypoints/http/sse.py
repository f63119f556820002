"""`WorkResponse`: cancels its work if the client disconnects. `EventStream`: server-sent events with backpressure."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

EVENTS = "text/event-stream; charset=utf-8"
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # without this header nginx would hold events back
]
DONE = b"data: [DONE]\n\n"  # how some APIs end a stream
COMMENT = b": keep-alive\n"  # no blank line: some clients take it for the end of an empty event


class WorkResponse(Response):
    """A response that runs `work(send)`. If the client disconnects, it cancels the work, and waits until the work has ended.

    `work` returns the response, or None if it has sent the response itself. If `work` raises an error before it has sent
    anything, the app's error handlers make the response.
    """

    def __init__(self, work: Callable[[Send], Awaitable[Response | None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(gone)
            if not work.done():
                await _end(work)
        if not work.cancelled() and (response := work.result()) is not None:
            await response(scope, receive, send)


class EventStream:
    """Sends events. Status and headers are sent only with the first event or comment. Until then the answer can still become an
    error with another status.

    Args:
        headers: further headers of the response.
        keep_alive: after this number of seconds without an event `kept_alive` sends something, so that no proxy closes the
            stream of a request that waits in the queue. If None, it sends nothing.
    """

    def __init__(
        self,
        send: Send,
        keep_alive: float | None = None,
        headers: Mapping[str, str] | None = None,
        media_type: str = EVENTS,
    ) -> None:
        self.has_started = False
        self._send = send
        self._headers = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self._headers.append((b"content-type", media_type.encode()))
        self._keep_alive = keep_alive
        self._sent_at = time.monotonic()
        self._lock = asyncio.Lock()

    async def send(self, events: bytes) -> None:
        """Send events. Returns when uvicorn accepts more data, so the task of a slow client waits here.

        Several tasks may call this method at the same time. The events are sent in the order of the calls.
        """
        async with self._lock:
            await self._write(events)

    async def _write(self, events: bytes) -> None:
        if not self.has_started:
            headers = [*_STREAM_HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.has_started = True
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._sent_at = time.monotonic()

    async def finish(self, events: bytes) -> None:
        await self.send(events)
        await self._send({"type": "http.response.body", "body": b""})

    @asynccontextmanager
    async def kept_alive(self, signal: Callable[[], bytes] = lambda: COMMENT) -> AsyncIterator[None]:
        """Send what `signal` returns each time that the `with` block has sent no event for the interval. Call `finish` after
        the block. The default is a comment, which clients ignore (HTML standard, section 9.2.6)."""
        if self._keep_alive is None:
            yield
            return
        ticking = asyncio.ensure_future(self._tick(self._keep_alive, signal))
        try:
            yield
        finally:
            await _end(ticking)

    async def _tick(self, interval: float, signal: Callable[[], bytes]) -> None:
        while True:
            await asyncio.sleep(self._sent_at + interval - time.monotonic())
            async with self._lock:
                # While this task waited for the lock, another one may have sent events. `signal` is called with the lock, so
                # that events that have a number are sent in the order of their numbers.
                if time.monotonic() - self._sent_at >= interval:
                    await self._write(signal())


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:  # Any: its result is not read
    task.cancel()
    await asyncio.wait((task,))
