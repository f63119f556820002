"""`SizeLimits`: no header and no body is larger than the settings say, whatever the client announces."""

from __future__ import annotations

import asyncio
import contextlib

from inflight.entrypoints.serve.error_response import ASGIApp, Message, Receive, Scope, Send, header_of, send_error

LINGER_SECONDS = 2.0  # that a client has to send the rest of what is refused
_CLOSE = [(b"connection", b"close")]  # the rest of the body is not wanted


class SizeLimits:
    """Too large headers are a 431, a too large body is a 413: at once where its length is announced, else where it gets too
    large. Then the app sees a client that has left, and what it says is not sent."""

    def __init__(self, app: ASGIApp, *, max_header_bytes: int, max_body_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if line + sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
            message = f"the request line and headers are larger than the {self._max_header_bytes} bytes allowed"
            await send_error(send, 431, message, kind="invalid_request_error", code="headers_too_large", headers=_CLOSE)
            return
        announced = header_of(scope, b"content-length")
        if announced is not None and announced.isdigit() and int(announced[:20]) > self._max_body_bytes:
            await self._refuse_body(receive, send, has_more=True)
            return
        await self._count_body(scope, receive, send)

    async def _count_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes, refused, started = 0, False, False

        async def bounded_receive() -> Message:
            nonlocal num_bytes, refused
            if refused:
                return {"type": "http.disconnect"}
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes <= self._max_body_bytes:
                return message
            refused = True
            if not started:
                await self._refuse_body(receive, send, message.get("more_body", False))
            return {"type": "http.disconnect"}

        async def unless_refused(message: Message) -> None:
            nonlocal started
            if not refused:
                started = True
                await send(message)

        await self._app(scope, bounded_receive, unless_refused)

    async def _refuse_body(self, receive: Receive, send: Send, has_more: bool) -> None:
        """The response ends, and with it the connection, when the client has sent all: closed with bytes unread, the kernel
        would reset it, and the client might never see why."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.body" and has_more:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        while (await receive()).get("more_body", False):
                            pass
            await send(message)

        message = f"the request body is larger than the {self._max_body_bytes} bytes allowed"
        await send_error(
            send_last, 413, message, kind="invalid_request_error", code="request_too_large", headers=_CLOSE
        )
