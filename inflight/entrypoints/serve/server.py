"""`Server`: one front end from its first answer to its exit code.

listen      -> the gate answers: /live 200, everything else 503
start       -> the engine starts behind it; then the app is behind the gate
shutdown    -> new requests are refused; the running ones have `shutdown_timeout` to end; then they are ended, each with its
               terminal event; connections are closed, the engine ends, exit code 0
cut         -> connections are cut, the engine ends, the exit code says so
the engine  -> every stream is told, and `run` fails with the reason
dies
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol, TypeVar, cast

import uvicorn

from inflight.entrypoints.serve.access_log import LineWriter
from inflight.entrypoints.serve.error_response import ASGIApp
from inflight.entrypoints.serve.gate import Gate
from inflight.entrypoints.serve.middlewares import wrap
from inflight.entrypoints.serve.protocol import bounded_protocol
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, Shutdown
from inflight.errors import EngineError

_T = TypeVar("_T")

FLUSH_SECONDS = 5  # what a client has to read the last of its response, once all is written
LOG_SECONDS = 1.0  # what the access log has to be written to its end
HEALTH_SECONDS = 0.5  # between two looks at the engine


class Running(Protocol):
    """What has been started: an engine, an app before it, and their metrics."""

    app: ASGIApp

    async def check_health(self) -> None:
        """
        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    async def drain(self, timeout: float) -> None:
        """Wait until all requests have ended; after `timeout` seconds end them."""
        ...

    async def close(self) -> None: ...

    def http_request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        ...

    def request_refused(self, reason: str) -> None:
        """A request was turned away by the gate, which says why in a word."""
        ...

    def engine_died(self) -> None: ...


Start = Callable[[], Awaitable[Running]]  # cancelled by a signal: then nothing is left running


class Server:
    """
    Args:
        settings: of the server.
        ssl_context: None speaks plain HTTP.
        start: starts the engine, and builds the app.
        shutdown: says when to end.
    """

    def __init__(
        self, settings: ServerSettings, ssl_context: ssl.SSLContext | None, start: Start, shutdown: Shutdown
    ) -> None:
        self._settings = settings
        self._start = start
        self._shutdown = shutdown
        self._gate = Gate(self._count_refusal)
        self._running: Running | None = None
        self._lines = None if settings.access_log == "off" else LineWriter()
        self._http = make_uvicorn(wrap(self._gate, settings, self._count, self._lines), settings, ssl_context)

    async def run(self, listener: socket.socket) -> int:
        """Serve until the shutdown; returns the exit code. To be called once.

        Raises:
            ConfigError, EngineError: the engine could not start, or has died. Nothing is left running.
        """
        http = asyncio.create_task(self._http.serve(sockets=[listener]))
        http.add_done_callback(lambda _: self._shutdown.begin())  # if it ends early, it has failed
        try:
            self._running = await self._unless(self._shutdown.begun, self._start())
            if self._running is not None:
                self._gate.open(self._running.app)
                await self._serve(self._running)
        finally:
            self._gate.drain()
            await self._end_connections(http)
            if self._running is not None:
                await self._close(self._running)
            if self._lines is not None:
                await asyncio.to_thread(self._lines.close, LOG_SECONDS)
        return self._shutdown.exit_code

    async def _serve(self, running: Running) -> None:
        """Until all requests have ended once the shutdown has begun, or are cut.

        Raises:
            EngineError: the engine has died.
        """
        try:
            await self._unless(self._shutdown.begun, _watch(running))
            self._gate.drain()
            await self._unless(self._shutdown.cut, running.drain(self._settings.shutdown_timeout))
        except EngineError:
            self._gate.fail()
            running.engine_died()
            raise

    async def _close(self, running: Running) -> None:
        """However long the engine needs; a cut, before or meanwhile, leaves it `CUT_SECONDS`."""
        closing, cut = asyncio.ensure_future(running.close()), asyncio.ensure_future(self._shutdown.cut.wait())
        await asyncio.wait([closing, cut], return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        await asyncio.wait([closing], timeout=CUT_SECONDS)

    async def _end_connections(self, http: asyncio.Task[None]) -> None:
        """All responses have their last byte, or never will. Connections get `FLUSH_SECONDS` to be read, a cut leaves none."""
        self._http.should_exit = True
        await self._unless(self._shutdown.cut, asyncio.wait([http]))
        if self._shutdown.cut.is_set():
            self._http.force_exit = True
            for connection in list(self._http.server_state.connections):
                connection.transport.abort()
        await http

    async def _unless(self, event: asyncio.Event, work: Awaitable[_T]) -> _T | None:
        """What the work returns. If the event is set first, the work is cancelled, and has ended unless that was cut short."""
        task = asyncio.ensure_future(work)
        waiters = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._shutdown.cut.wait())]
        try:
            await asyncio.wait([task, waiters[0]], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait([task, waiters[1]], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
            task.cancel()
        return task.result() if task.done() and not task.cancelled() else None

    def _count(self, route: str, status: int, seconds: float) -> None:
        if self._running is not None:
            self._running.http_request(route, status, seconds)

    def _count_refusal(self, reason: str) -> None:
        if self._running is not None:
            self._running.request_refused(reason)


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn's handlers would close the listener at the first one.

    Args:
        handshake_timeout: seconds that a client has for TLS's handshake. A connection is no protocol's before, and not counted.
    """

    def __init__(self, config: uvicorn.Config, handshake_timeout: float) -> None:
        super().__init__(config)
        self._handshake_timeout = (
            handshake_timeout if config.ssl is not None else None
        )  # asyncio wants none without TLS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own knows no time limit of a handshake."""
        config, loop = self.config, asyncio.get_running_loop()

        def make_protocol() -> asyncio.Protocol:
            protocol: Any = config.http_protocol_class  # Any: a name or a class
            made: asyncio.Protocol = protocol(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        self.servers = [
            await loop.create_server(
                make_protocol,
                sock=listener,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._handshake_timeout,
            )
            for listener in sockets or []
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_uvicorn(app: ASGIApp, settings: ServerSettings, ssl_context: ssl.SSLContext | None) -> uvicorn.Server:
    config = uvicorn.Config(
        cast("Any", app),  # Any: uvicorn names every message's fields
        http=bounded_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # `AccessLog`
        proxy_headers=False,  # whoever sends X-Forwarded-For could choose what is logged
        server_header=False,
        backlog=settings.backlog,
        timeout_keep_alive=math.ceil(settings.keep_alive_timeout),
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    config.load()
    config.ssl = ssl_context
    return _Uvicorn(config, settings.header_timeout)


async def _watch(running: Running) -> None:
    """Returns never.

    Raises:
        EngineDeadError: the engine has died.
    """
    while True:
        await running.check_health()
        await asyncio.sleep(HEALTH_SECONDS)
