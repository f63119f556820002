"""`SizeLimits`: bounds the size of each request body, whatever length it announces, and of all request bodies together."""

from __future__ import annotations

import asyncio
import contextlib

from inflight.entrypoints.serve.error_response import (
    RETRY_AFTER_SECONDS,
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
    header_of,
    send_error,
)

LINGER_SECONDS = 2.0  # that a client has to send the rest of what is refused
_CLOSE = [(b"connection", b"close")]  # the rest of the body is not wanted


class SizeLimits:
    """Too large headers are a 431, a too large body is a 413: at once where its length is announced, else where it gets too
    large. A body that finds no room beside the bodies of other requests is a 503. After that, `receive` reports a disconnect,
    and what the app sends is dropped.

    A body counts from its first byte until its request is answered, because the app may keep it until then.

    Args:
        max_total_body_bytes: size of the bodies of all requests together.
    """

    def __init__(self, app: ASGIApp, *, max_header_bytes: int, max_body_bytes: int, max_total_body_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes
        self._max_total = max_total_body_bytes
        self._total = 0  # bytes of bodies that are held now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if line + sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
            message = f"the request line and headers are larger than the {self._max_header_bytes} bytes allowed"
            await send_error(send, 431, message, kind="invalid_request_error", code="headers_too_large", headers=_CLOSE)
            return
        announced = header_of(scope, b"content-length")
        if announced is not None and announced.isdigit() and int(announced[:20]) > self._max_body_bytes:
            await self._refuse_too_large(receive, send, has_more=True)
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
                is_too_large, has_more = num_bytes + added > self._max_body_bytes, message.get("more_body", False)
                await (self._refuse_too_large if is_too_large else self._refuse_for_now)(receive, send, has_more)
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

    async def _refuse_too_large(self, receive: Receive, send: Send, has_more: bool) -> None:
        message = f"the request body is larger than the {self._max_body_bytes} bytes allowed"
        await send_error(
            _lingering(receive, send, has_more),
            413,
            message,
            kind="invalid_request_error",
            code="request_too_large",
            headers=_CLOSE,
        )

    async def _refuse_for_now(self, receive: Receive, send: Send, has_more: bool) -> None:
        message = f"the bodies of all requests together reach the limit of {self._max_total} bytes; try again later"
        await send_error(
            _lingering(receive, send, has_more),
            503,
            message,
            kind="overloaded_error",
            code="overloaded",
            headers=[*_CLOSE, (b"retry-after", b"%d" % RETRY_AFTER_SECONDS)],
        )


def _lingering(receive: Receive, send: Send, has_more: bool) -> Send:
    """End the response, and with it the connection, only after the client has sent its whole body, or after
    LINGER_SECONDS. If the connection were closed while bytes are unread, the kernel would reset it, and the client might
    never see the response."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.body" and has_more:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while (await receive()).get("more_body", False):
                        pass
        await send(message)

    return send_last
