"""`Server`: one front end from its first answer to its exit code.

listen      -> the gate answers: /live 200, everything else 503
start       -> the engine starts behind it; then the app is behind the gate
SIGTERM     -> new requests are refused; the running ones have `shutdown_timeout` to end; then they are ended, each with its
(or SIGINT)    terminal event; connections are closed, the engine ends, exit code 0
again       -> connections are cut, the engine ends, exit code 128 + the signal's number. A third one kills this process
the engine  -> every stream is told, and the command fails with the reason
dies
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import uvicorn

from inflight.entrypoints.serve.access_log import Observe
from inflight.entrypoints.serve.error_response import ASGIApp
from inflight.entrypoints.serve.gate import Gate
from inflight.entrypoints.serve.middlewares import wrap
from inflight.entrypoints.serve.protocol import bounded_protocol
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import EngineError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FLUSH_SECONDS = 5  # what a client has to read the last of its response, once all is written
CUT_SECONDS = 5.0  # what the engine has to end after a second signal
HEALTH_SECONDS = 0.5  # between two looks at the engine


class ServedEngine(Protocol):
    """What the server needs of an `AsyncLLM`."""

    async def check_health(self) -> None: ...

    async def drain(self, timeout: float) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Running:
    """What has been started: the engine, the app before it, and who counts requests."""

    engine: ServedEngine
    app: ASGIApp
    observe: Observe | None = None


Start = Callable[[], Awaitable[Running]]  # cancelled by a signal: then nothing is left running


class Server:
    """
    Args:
        settings: of the server.
        ssl_context: None speaks plain HTTP.
        start: starts the engine, and builds the app.
    """

    def __init__(self, settings: ServerSettings, ssl_context: ssl.SSLContext | None, start: Start) -> None:
        self._settings = settings
        self._start = start
        self._gate = Gate()
        self._observe: Observe | None = None
        self._signals: list[signal.Signals] = []
        self._stop = asyncio.Event()  # the first signal
        self._cut = asyncio.Event()  # the second
        self._http = _make_uvicorn(wrap(self._gate, settings, self._count), settings, ssl_context)

    async def run(self, listener: socket.socket) -> int:
        """Serve until a signal; returns the exit code. To be called once, on the main thread's loop.

        Raises:
            ConfigError, EngineError: the engine could not start, or has died. Nothing is left running.
        """
        engine: ServedEngine | None = None
        with self._handle_signals():
            http = asyncio.create_task(self._http.serve(sockets=[listener]))
            http.add_done_callback(lambda _: self._stop.set())  # it ends early only if it fails
            try:
                running = await self._unless(self._stop, self._start())
                if running is not None:
                    engine, self._observe = running.engine, running.observe
                    self._gate.open(running.app)
                    await self._serve(engine)
            finally:
                self._gate.drain()
                await self._end_connections(http)
                if engine is not None:
                    await asyncio.wait([asyncio.ensure_future(engine.close())], timeout=self._close_seconds())
        return 128 + self._signals[-1] if self._cut.is_set() else 0

    async def _serve(self, engine: ServedEngine) -> None:
        """Until all requests have ended after a signal, or a second one has come.

        Raises:
            EngineError: the engine has died.
        """
        try:
            await self._unless(self._stop, _watch(engine))
            self._gate.drain()
            await self._unless(self._cut, engine.drain(self._settings.shutdown_timeout))
        except EngineError:
            self._gate.fail()
            raise

    def _close_seconds(self) -> float | None:
        return CUT_SECONDS if self._cut.is_set() else None

    async def _end_connections(self, http: asyncio.Task[None]) -> None:
        """All responses have their last byte, or never will. Connections get `FLUSH_SECONDS` to be read, a cut leaves none."""
        self._http.should_exit = True
        await self._unless(self._cut, asyncio.wait([http]))
        if self._cut.is_set():
            self._http.force_exit = True
            for connection in list(self._http.server_state.connections):
                connection.transport.abort()
        await http

    async def _unless(self, event: asyncio.Event, work: Awaitable[_T]) -> _T | None:
        """What the work returns. If the event is set first, the work is cancelled, and has ended unless that was cut short."""
        task = asyncio.ensure_future(work)
        waiters = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._cut.wait())]
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

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if not self._stop.is_set():
            logger.info(
                "%s: new requests are refused, running ones have %g s; once more stops at once",
                number.name,
                self._settings.shutdown_timeout,
            )
            self._stop.set()
            return
        logger.warning("%s again: connections are cut", number.name)
        self._cut.set()
        for handled in SIGNALS:
            signal.signal(handled, signal.SIG_DFL)

    def _count(self, route: str, status: int, seconds: float) -> None:
        if self._observe is not None:
            self._observe(route, status, seconds)


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn's handlers would close the listener at the first one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _make_uvicorn(app: ASGIApp, settings: ServerSettings, ssl_context: ssl.SSLContext | None) -> uvicorn.Server:
    config = uvicorn.Config(
        cast("Any", app),  # Any: uvicorn names every message's fields
        http=bounded_protocol(settings.max_header_bytes, settings.header_timeout),
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
    return _Uvicorn(config)


async def _watch(engine: ServedEngine) -> None:
    """Returns never.

    Raises:
        EngineDeadError: the engine has died.
    """
    while True:
        await engine.check_health()
        await asyncio.sleep(HEALTH_SECONDS)
