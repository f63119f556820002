"""`SizeLimits`: limits the size of headers, of each request body, and of all request bodies together."""

from __future__ import annotations

import asyncio
import contextlib

from inflight.entrypoints.serve.asgi import ASGIApp, Message, Receive, Scope, Send, header_of, send_error
from inflight.entrypoints.serve.settings import ServerSettings

LINGER_SECONDS = 2.0  # time for a client to send the rest of a body that is refused


class SizeLimits:
    """Refuses a request with status 431 if its request line and headers are too large, and with 413 if its body is too large. A
    Content-Length that is too large is refused at once. A body without Content-Length is refused when it exceeds the limit. If
    the bodies of all requests together are too large, the status is 503. If the app has already begun to read a refused body,
    it receives a disconnect, and what it sends after that is dropped.

    The bytes of a body count until the app has answered the request, because the app may hold them until then.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max_header_bytes = settings.max_header_bytes
        self._max_body_bytes = settings.max_body_bytes
        self._max_total = settings.max_total_body_bytes
        self._total = 0  # bytes of the bodies of all running requests
        headers = f"the request line and headers are larger than the {self._max_header_bytes} bytes allowed"
        body = f"the request body is larger than the {self._max_body_bytes} bytes allowed"
        total = f"the bodies of all running requests together would exceed {self._max_total} bytes; try again later"
        self._refusals = {  # status -> message, error.type, error.code
            431: (headers, "invalid_request_error", "headers_too_large"),
            413: (body, "invalid_request_error", "request_too_large"),
            503: (total, "overloaded_error", "overloaded"),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if line + sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
            await self._refuse(scope, send, 431)
            return
        announced = header_of(scope, b"content-length")
        if announced is not None and announced.isdigit() and int(announced[:20]) > self._max_body_bytes:
            await self._refuse(scope, _lingering(receive, send), 413)
            return
        await self._count_body(scope, receive, send)

    async def _count_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes, refused, started = 0, False, False

        async def bounded_receive() -> Message:
            nonlocal num_bytes, refused
            if refused:
                return {"type": "http.disconnect"}
            message = await receive()
            added = len(message.get("body", b""))
            if num_bytes + added <= self._max_body_bytes and self._total + added <= self._max_total:
                num_bytes += added
                self._total += added
                return message
            refused = True
            if not started:
                status = 413 if num_bytes + added > self._max_body_bytes else 503
                await self._refuse(
                    scope, _lingering(receive, send) if message.get("more_body", False) else send, status
                )
            return {"type": "http.disconnect"}

        async def unless_refused(message: Message) -> None:
            nonlocal started
            if not refused:
                started = True
                await send(message)

        try:
            await self._app(scope, bounded_receive, unless_refused)
        finally:
            self._total -= num_bytes

    async def _refuse(self, scope: Scope, send: Send, status: int) -> None:
        message, kind, code = self._refusals[status]
        await send_error(scope, send, status, message, kind=kind, code=code, headers=[(b"connection", b"close")])


def _lingering(receive: Receive, send: Send) -> Send:
    """Wraps `send`, so that the response and its connection end only when the client has sent its whole body, or after
    LINGER_SECONDS. If the server closed the connection while bytes are unread, the kernel would reset the connection, and the
    client might never see the response."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.body":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while (await receive()).get("more_body", False):
                        pass
        await send(message)

    return send_last
