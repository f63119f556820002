"""`BoundedProtocol`: uvicorn's HTTP protocol with limits on connections, on slow or large requests, and on slow readers.

httptools, uvicorn's parser, accepts a head (request line and headers) of any size. uvicorn waits for the head and the body
without a time limit. No middleware could set these limits: a middleware sees a head only when the head is complete, and never
sees the part of a body that arrives after the response.

Further differences from uvicorn:

1. When a connection is lost, its running request ends, even if further requests wait on the connection (pipelining). uvicorn
   ends only the request that came last. While requests wait, uvicorn also stops reading, so it notices no lost connection.
2. `Upgrade` is ignored, which RFC 9110, section 7.8 allows. The request is answered in HTTP/1.1. httptools stops after the
   head of such a request, because it expects data of another protocol there. So `_feed` gives httptools the head once more,
   without `Upgrade`.
3. Trailers (headers after the body) are ignored, which RFC 9110, section 6.5.1 allows. uvicorn adds them to the headers.
4. A client of HTTP/1.0 gets no chunks, which RFC 9112, section 6.1 forbids: the end of the connection ends a body without a
   length. It gets no "100 Continue" either. Its connection is always closed after the response, also if it asks to keep it.
"""

import asyncio
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from inflight.entrypoints.serve.asgi import RETRY_AFTER_SECONDS
from inflight.entrypoints.serve.settings import ServerSettings

# The largest numbers of requests and of bytes that may wait on a connection while an earlier request runs. If more arrive, the
# connection is closed. A client can bear this: RFC 9112, section 9.3.2 lets it send pipelined requests again.
MAX_PIPELINED_REQUESTS = 32
MAX_PIPELINED_BYTES = 256 * 2**10


# After each read of a body whose request has been answered. A read has 256 KiB at most, so it is 13 MB/s.
UNREAD_PAUSE_SECONDS = 0.02

_WITHOUT_CHUNKS = ("0.9", "1.0")  # versions of HTTP


class _EndedByClose:
    """The app for a request whose response must have no chunks. Without a length, uvicorn would write chunks; with one, it
    counts the bytes of the body. So a response without a length gets, for each piece of the body, the length of this piece."""

    def __init__(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._cycle = cycle
        self._app = app
        self._has_length = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI's own, as uvicorn names them
        async def send_without_chunks(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                self._cycle.chunked_encoding = None if self._has_length else False
            elif not self._has_length:
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_without_chunks)


class BoundedProtocol(HttpToolsProtocol):
    """`settings.max_body_bytes` also limits the rest of a body whose request has been answered. Nobody reads it, but it takes
    time, so it is received slowly.

    `settings.max_header_bytes` also limits the bytes outside bodies: heads, trailers and extensions of chunks. They are
    counted after each read from the socket, so they may exceed the limit by the size of one read. `SizeLimits` counts the bytes
    of a complete head exactly."""

    settings: ServerSettings

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: uvicorn's
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # bytes read since the last read that contained a piece of a body, or the end of a head or of a request
        self._num_bodiless_bytes = 0
        self._num_waiting_bytes = 0  # bytes read since a request began to wait behind the running one
        self._num_unread_bytes = 0  # of a body that came after the response to its request
        self._pause: asyncio.TimerHandle | None = None  # ends a pause in reading such a body
        self._is_in_head = False
        self._is_moving = False  # the last read contained a piece of a body, or the end of a head or of a request
        self._running: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None  # limits the time for the head or body that is being received
        self._write_timer: asyncio.TimerHandle | None = None  # limits the time in which a client reads nothing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._refuse(b"503 Service Unavailable\r\nretry-after: %d" % RETRY_AFTER_SECONDS)
        else:
            self._await(self.settings.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_write_timer()
        if self._pause is not None:
            self._pause.cancel()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    # -- reading -----------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # the connection has been refused
            return
        self._is_moving = False
        self._feed(data)
        self._num_bodiless_bytes = 0 if self._is_moving else self._num_bodiless_bytes + len(data)
        if self._num_bodiless_bytes > self.settings.max_header_bytes:
            if self._would_be_misread():
                self._close()
            else:
                self._refuse(b"431 Request Header Fields Too Large")
        self._num_waiting_bytes = self._num_waiting_bytes + len(data) if self.pipeline else 0
        if self._num_waiting_bytes > MAX_PIPELINED_BYTES:
            self._close()

    def _feed(self, data: bytes) -> None:
        """uvicorn's `data_received`, except that `Upgrade` is ignored."""
        self._unset_keepalive_if_required()
        while data and not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                rest = data[stop.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            if self.parser.get_method() == b"CONNECT":
                self._refuse(b"501 Not Implemented")
                return
            data = self._head_without_upgrade() + rest
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _head_without_upgrade(self) -> bytes:
        """Returns the head that has been read, without its `Upgrade` header. A new parser can read it."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        if self._timer is None:
            self._await(self.settings.header_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # otherwise the header is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() or self.transport.is_closing():  # `_feed` removes `Upgrade` and parses again
            return
        self._is_in_head, self._is_moving = False, True
        self._num_unread_bytes = 0
        self._await(self.settings.body_timeout)
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            self._close()
            return
        super().on_headers_complete()
        self._go_on_reading()

    def on_body(self, body: bytes) -> None:
        self._is_moving = True
        if self.transport.is_closing():
            return
        super().on_body(body)
        self._go_on_reading()
        if self.cycle.response_complete:
            self._num_unread_bytes += len(body)
            if self._num_unread_bytes > self.settings.max_body_bytes:
                self._close()
            elif self._pause is None:
                self.flow.pause_reading()
                self._pause = self.loop.call_later(UNREAD_PAUSE_SECONDS, self._end_pause)

    def _end_pause(self) -> None:
        self._pause = None
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_moving = True
        self._cancel_timer()
        if not self.transport.is_closing():
            super().on_message_complete()

    def _go_on_reading(self) -> None:
        """Continue to read while requests wait, so that a lost connection is noticed. uvicorn has just stopped reading."""
        if self.pipeline:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if cycle.scope["http_version"] in _WITHOUT_CHUNKS:
            cycle.keep_alive = cycle.waiting_for_100_continue = False
            app = _EndedByClose(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _await(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.pipeline:  # the response to an earlier request has not ended
            self._await(self.settings.body_timeout)
        elif self._is_in_head or self.cycle is None or self.cycle.response_started:
            self._close()
        else:
            self._refuse(b"408 Request Timeout")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- writing -----------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_write_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_client()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close the transport when everything is written. If the client reads nothing, the write timer ends the connection."""
        if not self.transport.is_closing():
            self.transport.close()
            self._watch_client()

    def _watch_client(self) -> None:
        """Start the write timer. Nothing is added to the transport's buffer now, because the buffer is full or the transport is
        closing. So if the buffer has the same size when the timer ends, the client has read nothing."""
        self._cancel_write_timer()
        num_unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.settings.write_timeout, self._check_client, num_unsent)

    def _check_client(self, num_unsent_before: int) -> None:
        """End the connection if the client has read nothing since the timer started, or if everything has been sent. Otherwise
        start the timer again."""
        self._write_timer = None
        if 0 < self.transport.get_write_buffer_size() < num_unsent_before:
            self._watch_client()
        else:
            self.transport.abort()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        if self._would_be_misread():
            self._close()
        else:
            super().send_400_response(msg)
            self._watch_client()

    def _would_be_misread(self) -> bool:
        """Whether a client would misread a refusal that is sent now, as a part of the running response or as the response to an
        earlier request."""
        running = self._running
        if running is None:
            return False
        if self._is_in_head:
            return not running.response_complete
        return running is not self.cycle or bool(running.response_started)

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self._close()


def bounded_protocol(settings: ServerSettings) -> type[BoundedProtocol]:
    """Returns a subclass of `BoundedProtocol` with these settings. uvicorn constructs the protocols, and cannot pass settings
    to them."""
    return type("BoundedProtocolOfSettings", (BoundedProtocol,), {"settings": settings})
