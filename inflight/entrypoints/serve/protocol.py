"""`BoundedProtocol`: uvicorn's HTTP protocol, with bounds on connections, and on how large and how slow a request may be.

httptools collects a head of any size, and uvicorn waits for it, and for the body, however long; a middleware sees a head only
when it is whole, and no rest of a body that comes after the response.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from inflight.entrypoints.serve.error_response import RETRY_AFTER_SECONDS
from inflight.entrypoints.serve.settings import ServerSettings


class BoundedProtocol(HttpToolsProtocol):
    """The head is counted by reads: one read more than `max_header_bytes` may be held before `SizeLimits` counts exactly."""

    settings: ServerSettings

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: uvicorn's
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._num_head_bytes = 0
        self._is_in_head = False
        self._timer: asyncio.TimerHandle | None = None  # of the head or the body that is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._refuse(b"503 Service Unavailable\r\nretry-after: %d" % RETRY_AFTER_SECONDS)
        else:
            self._await(self.settings.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused
            return
        if self._num_head_bytes > self.settings.max_header_bytes:  # and still no end of the head
            self._refuse(_TOO_LARGE)
            return
        self._num_head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_head:
            self._num_head_bytes = 0
        elif self._num_head_bytes > self.settings.max_header_bytes:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        if self._timer is None:
            self._await(self.settings.header_timeout)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._await(self.settings.body_timeout)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._cancel_timer()
        super().on_message_complete()

    def _await(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.pipeline:  # nothing is read until the response to an earlier request has ended
            self._await(self.settings.body_timeout)
        elif self._is_in_head or self.cycle is None or self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(b"408 Request Timeout")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()


_TOO_LARGE = b"431 Request Header Fields Too Large"


def bounded_protocol(settings: ServerSettings) -> type[BoundedProtocol]:
    """uvicorn makes the protocols itself and hands them nothing of ours: the settings are the class's."""
    return type("BoundedProtocolOfSettings", (BoundedProtocol,), {"settings": settings})
