"""`BoundedProtocol`: uvicorn's HTTP protocol, with a bound on how large and how slow a request's head may be.

httptools collects a head of any size, and uvicorn waits for it however long; a middleware sees it only when it is whole.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState


class BoundedProtocol(HttpToolsProtocol):
    """The head is counted by reads: one read more than `max_header_bytes` may be held before `SizeLimits` counts exactly."""

    max_header_bytes: int
    header_timeout: float  # seconds

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
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._num_head_bytes > self.max_header_bytes:  # and still no end of the head
            self._refuse()
            return
        self._num_head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_head:
            self._num_head_bytes = 0
        elif self._num_head_bytes > self.max_header_bytes:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._cancel_timer()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.header_timeout, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()


def bounded_protocol(max_header_bytes: int, header_timeout: float) -> type[BoundedProtocol]:
    """uvicorn makes the protocols itself and hands them nothing of ours: the bounds are the class's."""
    bounds = {"max_header_bytes": max_header_bytes, "header_timeout": header_timeout}
    return type("BoundedProtocolOfSettings", (BoundedProtocol,), bounds)
