"""`Server`: runs one front end (a process that serves HTTP), from its first answer to its exit code.

listen           the `Gate` (it decides which requests the app gets) answers /live with 200, and everything else with 503
start            the engine starts; when it is ready, the gate passes requests to the app
shutdown         new requests are refused; running requests have `shutdown_timeout` seconds, and then get a last event;
                 connections are closed, the engine ends, the exit code is 0
cut              connections are cut, the engine ends, the exit code is the one given to `Shutdown.cut_now`
the engine dies  every stream gets an error as its last event, and `run` raises an error with the reason
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import uvicorn

from inflight.entrypoints.serve.access_log import report_dropped
from inflight.entrypoints.serve.api_keys import ApiKeys
from inflight.entrypoints.serve.asgi import ASGIApp
from inflight.entrypoints.serve.gate import Gate
from inflight.entrypoints.serve.middlewares import wrap
from inflight.entrypoints.serve.protocol import bounded_protocol
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, Shutdown
from inflight.entrypoints.serve.terminal import ServerTerminal
from inflight.entrypoints.serve.tls import reload_certificate
from inflight.errors import ConfigError, EngineError
from inflight.line_writer import LineWriter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

FLUSH_SECONDS = 5  # time for a client to read the end of its response after all has been written
LOG_SECONDS = 1.0  # time for the access log to write its last lines
HEALTH_SECONDS = 0.5  # time between two checks of the engine
_STDOUT = 1


class ServedEngine(Protocol):
    """What a `Server` needs of the engine: see `AsyncLLM`."""

    async def check_health(self) -> None: ...

    async def drain(self, timeout: float) -> None: ...


class ServerMetrics(Protocol):
    """Counts what a `Server` does: see `ServingMetrics`."""

    def http_request(self, route: str, status: int, seconds: float) -> None: ...

    def request_refused(self, reason: str) -> None: ...

    def engine_died(self) -> None: ...


class Served(Protocol):
    """What a `Server` serves: one model (`ServedModel`), or several (router/)."""

    @property
    def engine(self) -> ServedEngine: ...

    @property
    def app(self) -> ASGIApp: ...

    @property
    def metrics(self) -> ServerMetrics: ...

    async def close(self) -> None: ...


class StartUpClock:
    """Measures and logs how long each phase of the start takes. The first phase begins when the process starts. Each other
    phase begins when the phase before it ends."""

    def __init__(self) -> None:
        self._end = 0.0  # end of the last phase, in seconds since the process started
        self._phases: list[str] = []

    def mark(self, phase: str) -> None:
        """Call this when `phase` has ended."""
        now = seconds_since_process_start()
        logger.debug("start-up: %s took %.2f s (%.2f s since the command)", phase, now - self._end, now)
        self._phases.append(f"{phase} {now - self._end:.2f}")
        self._end = now

    def summary(self) -> str:
        """For example "3.21 s: listening 0.31, engine 2.90"."""
        return f"{self._end:.2f} s: {', '.join(self._phases)}"


def seconds_since_process_start() -> float:
    """proc(5): field 22 of /proc/self/stat is the time at which the process started, in clock ticks since boot."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Server:
    """
    Args:
        ssl_context: None for plain HTTP.
        start: starts the engine, and builds the app. If it is cancelled, it must leave nothing running.
        shutdown: tells the server when to end.
        accepts_early: whether to accept connections while the engine starts, and to refuse their requests with status 503. If
            not, the kernel keeps new connections, with their requests, until this server or another one at the same listener
            accepts them.
    """

    def __init__(
        self,
        settings: ServerSettings,
        ssl_context: ssl.SSLContext | None,
        start: Callable[[], Awaitable[Served]],
        shutdown: Shutdown,
        *,
        accepts_early: bool = True,
        terminal: ServerTerminal | None = None,
    ) -> None:
        self._settings = settings
        self._accepts_early = accepts_early
        self._start = start
        self._shutdown = shutdown
        self._terminal = terminal
        self._gate = Gate(self._count_refusal)
        self._model: Served | None = None
        self._ssl_context = ssl_context
        self._keys = ApiKeys(settings.api_keys, settings.api_key_file)
        self._lines = None if settings.access_log == "off" else LineWriter(_STDOUT, report_dropped)
        self._http = make_uvicorn(
            wrap(self._gate, settings, self._count, self._lines, self._keys), settings, ssl_context
        )

    async def run(self, listener: socket.socket) -> int:
        """Serve until the shutdown. Returns the exit code. Call it once.

        Raises:
            ConfigError, EngineError: the engine could not start, or has died. Nothing is left running.
        """
        read_again = self._read_files_again if reads_files_again(self._settings) else None
        if self._terminal is not None:
            self._terminal.on_hangup(self._shutdown.begin, read_again)
        elif read_again is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)
        http = self._accept(listener) if self._accepts_early else None
        try:
            self._model = await self._unless(self._shutdown.begun, self._start())
            if self._model is not None:
                self._gate.open(self._model.app)
                http = http or self._accept(listener)
                await self._serve(self._model)
        finally:
            self._gate.drain()
            if http is not None:
                await self._end_connections(http)
            if self._model is not None:
                await self._close(self._model)
            if self._lines is not None:
                await asyncio.to_thread(self._lines.close, LOG_SECONDS)
        return self._shutdown.exit_code

    def _accept(self, listener: socket.socket) -> asyncio.Task[None]:
        http = asyncio.create_task(self._http.serve(sockets=[listener]))
        http.add_done_callback(lambda _: self._shutdown.begin())  # if uvicorn ends early, it has failed
        return http

    def _read_files_again(self) -> None:
        """Read the certificate, its private key and the API keys again. If a file is wrong, its old contents stay in use."""
        try:
            if self._ssl_context is not None:
                reload_certificate(self._ssl_context, self._settings)
                logger.info("SIGHUP: new connections get the certificate in %s", self._settings.ssl_certfile)
        except ConfigError as error:
            logger.error("SIGHUP: the old certificate stays in use: %s", error)
        try:
            if self._settings.api_key_file is not None:
                logger.info("SIGHUP: %d API keys are in use", self._keys.read_file_again())
        except ConfigError as error:
            logger.error("SIGHUP: the old API keys stay in use: %s", error)

    async def _serve(self, model: Served) -> None:
        """Serve until the shutdown has begun and all requests have ended or are cut.

        Raises:
            EngineError: the engine has died.
        """
        try:
            await self._unless(self._shutdown.begun, _watch(model))
            self._gate.drain()
            await self._unless(self._shutdown.cut, model.engine.drain(self._settings.shutdown_timeout))
        except EngineError:
            self._gate.fail()
            model.metrics.engine_died()
            raise

    async def _close(self, model: Served) -> None:
        """Wait until the engine has ended. After a cut, wait at most `CUT_SECONDS`."""
        closing = asyncio.ensure_future(model.close())
        cut = asyncio.ensure_future(self._shutdown.cut.wait())
        await asyncio.wait([closing, cut], return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        await asyncio.wait([closing], timeout=CUT_SECONDS)

    async def _end_connections(self, http: asyncio.Task[None]) -> None:
        """Close all connections. Clients have `FLUSH_SECONDS` to read what is written. A cut closes the connections at once."""
        self._http.should_exit = True
        await self._unless(self._shutdown.cut, asyncio.wait([http]))
        if self._shutdown.cut.is_set():
            self._http.force_exit = True
            for connection in list(self._http.server_state.connections):
                connection.transport.abort()
        await http

    async def _unless(self, event: asyncio.Event, work: Awaitable[_T]) -> _T | None:
        """Return the result of `work`. If `event` is set first, cancel `work`, wait until it has ended, and return None. After
        a cut, do not wait."""
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
        if self._model is not None:
            self._model.metrics.http_request(route, status, seconds)

    def _count_refusal(self, reason: str) -> None:
        if self._model is not None:
            self._model.metrics.request_refused(reason)


def reads_files_again(settings: ServerSettings) -> bool:
    """Whether the server has files that SIGHUP makes it read again."""
    return settings.ssl_certfile is not None or settings.api_key_file is not None


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would close the listener at the first signal.

    Args:
        handshake_timeout: seconds that a client has for the TLS handshake. `BoundedProtocol` cannot limit this time, because it
            sees a connection only after the handshake.
    """

    def __init__(self, config: uvicorn.Config, handshake_timeout: float) -> None:
        super().__init__(config)
        self._handshake_timeout = None if config.ssl is None else handshake_timeout  # asyncio allows it only with TLS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's `startup`, but it limits the time for TLS handshakes."""
        make_protocol = partial(
            cast("Any", self.config.http_protocol_class),  # Any: for uvicorn it is a name or a class; here a class
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = [
            await asyncio.get_running_loop().create_server(
                make_protocol,
                sock=listener,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
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
        cast("Any", app),  # Any: uvicorn's own type has a class for each kind of message
        http=bounded_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # `AccessLog` writes it
        proxy_headers=False,  # a middleware reads them
        server_header=False,
        backlog=settings.backlog,
        timeout_keep_alive=math.ceil(settings.keep_alive_timeout),
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    config.load()
    config.ssl = ssl_context
    return _Uvicorn(config, settings.header_timeout)


async def _watch(model: Served) -> None:
    """Check the engine every HEALTH_SECONDS. Never returns.

    Raises:
        EngineDeadError: the engine has died.
    """
    while True:
        await model.engine.check_health()
        await asyncio.sleep(HEALTH_SECONDS)
