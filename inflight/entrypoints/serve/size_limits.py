"""`SizeLimits`: limits the size of headers, of each request body, and of all request bodies together."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import NamedTuple

from inflight.engine.serving.client import Shares
from inflight.entrypoints.serve.asgi import ASGIApp, Message, Receive, Scope, Send, header_of, send_error
from inflight.entrypoints.serve.settings import ServerSettings

# Python keeps a text with 1, 2 or 4 bytes for each character, as its widest character needs. So one wide character makes a
# whole text four times as large when the body is parsed. It may be written as UTF-8, or as an escape of JSON. Bytes are looked
# for with `translate`, because a regular expression for several bytes takes 20 times as long. All streams would wait for it.
_WIDE_BYTES = bytes(range(0xF0, 0xF5))
_MIDDLE_BYTES = bytes(range(0xC4, 0xF0))
_WIDE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_VALUE_BYTES = 9  # for each list, object and item: they take more memory than their text, in proportion to texts
_OBJECT_VALUES = 5  # an object takes as much memory as this many other values
# For a client to send the rest of a body that is refused. Reading is slow, because it takes the front end's time from others.
LINGER_SECONDS = 2.0
LINGER_PAUSE_SECONDS = 0.02  # after each piece of at most 256 KiB: 13 MB/s


class ParsedSize(NamedTuple):
    """How many bytes a body counts as, so far. The memory of a parsed body is at most about four times this number, whatever
    the body has: texts of ASCII, of wide characters, or many small lists."""

    received: int = 0
    width: int = 1
    num_values: int = 0
    last: bytes = b""  # the last bytes, which may be the beginning of an escape

    @property
    def num_bytes(self) -> int:
        return self.received * self.width + self.num_values * _VALUE_BYTES

    def with_chunk(self, chunk: bytes) -> ParsedSize:
        width = self.width
        searched = self.last + chunk
        if width < 4:
            width = max(width, _width_of(searched))
        num_values = self.num_values + sum(map(chunk.count, (b"[", b",")))
        num_values += _OBJECT_VALUES * chunk.count(b"{")
        return ParsedSize(self.received + len(chunk), width, num_values, searched[-3:])


def _width_of(text: bytes) -> int:
    """How many bytes Python needs for a character of this part of a JSON text: 1, 2 or 4."""
    width = 1
    if not text.isascii():
        if _has_any(text, _WIDE_BYTES):
            return 4
        if _has_any(text, _MIDDLE_BYTES):
            width = 2
    if b"\\" in text:
        if _WIDE_ESCAPE.search(text):
            return 4
        if b"\\u" in text:
            width = 2
    return width


def _has_any(text: bytes, wanted: bytes) -> bool:
    return len(text.translate(None, wanted)) < len(text)


class SizeLimits:
    """Refuses a request with status 431 if its request line and headers are too large, and with 413 if its body is too large. A
    Content-Length that is too large is refused at once. A body without Content-Length is refused when it exceeds the limit. If
    the bodies of all requests together are too large, the status is 503. If the app has already begun to read a refused body,
    it receives a disconnect, and what it sends after that is dropped.

    The bytes of a body count until the app has answered the request, because the app may hold them until then. For the limit of
    all bodies together they count as they are when they are parsed (`ParsedSize`), because this is what takes memory. A part of
    this limit is kept from an address that has more than half of it (`Shares`).
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max_header_bytes = settings.max_header_bytes
        self._max_body_bytes = settings.max_body_bytes
        self._max_total = settings.max_total_body_bytes
        self._total = 0  # bytes of the bodies of all running requests
        self._shares = Shares()
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
        headers = sum(len(name) + len(value) for name, value in scope["headers"])
        if line + headers > self._max_header_bytes:
            await self._refuse(scope, send, 431)
            return
        announced = header_of(scope, b"content-length")
        if announced is not None and announced.isdigit() and int(announced[:20]) > self._max_body_bytes:
            await self._refuse(scope, _lingering(receive, send), 413)
            return
        await self._count_body(scope, receive, send)

    async def _count_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0
        refused = False
        started = False
        parsed = ParsedSize()
        address = str((scope.get("client") or ("",))[0])  # all connections of a client, whose key is not known yet
        body = object()

        async def bounded_receive() -> Message:
            nonlocal num_bytes, refused, parsed
            if refused:
                return {"type": "http.disconnect"}
            message = await receive()
            chunk = message.get("body", b"")
            added = len(chunk)
            larger = parsed.with_chunk(chunk)
            total = self._total - parsed.num_bytes + larger.num_bytes
            # a body that is alone may be larger when it is parsed
            is_room = total <= self._shares.most(address, self._max_total) or (
                self._total == parsed.num_bytes and num_bytes + added <= self._max_total
            )
            if num_bytes + added <= self._max_body_bytes and is_room:
                num_bytes, self._total, parsed = num_bytes + added, total, larger
                self._shares.hold(body, address, parsed.num_bytes)
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
            self._total -= parsed.num_bytes
            self._shares.release(body)

    async def _refuse(self, scope: Scope, send: Send, status: int) -> None:
        message, kind, code = self._refusals[status]
        await send_error(scope, send, status, message, kind=kind, code=code, headers=[(b"connection", b"close")])


def _lingering(receive: Receive, send: Send) -> Send:
    """Wraps `send`, so that the connection ends only when the client has sent its whole body, or after LINGER_SECONDS. The
    response is sent before. If the server closed the connection while bytes are unread, the kernel would reset the connection,
    and the client might never see the response."""

    async def send_last(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    await asyncio.sleep(LINGER_PAUSE_SECONDS)
        await send({"type": "http.response.body", "body": b""})

    return send_last
