"""`supervise`: starts, watches and ends several front ends (processes that serve HTTP), which share one engine.

    this process        owns the listener's address, the engine's process and the folder of the metrics; serves no request
     |-- engine
     |-- front end 0    a `Server`; records the engine's statistics
     |-- front end 1    a `Server`

All front ends accept connections on the same listener. They answer requests once all of them are ready. After the first signal
to this process, the front ends drain: they refuse new requests, and let running requests end. After the second signal, they cut
their connections. If a front end fails or dies, the others drain and `inflight serve` fails, so that systemd or Kubernetes
starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import signal
import socket
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve.front_end_main import CUT, DRAIN, ENGINE, OPEN, FrontEndStart
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.server import StartUpClock, reads_files_again
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, END_SECONDS, Shutdown
from inflight.errors import EngineError, InflightError, error_by_name
from inflight.executor.process import ChildProcess, stop_processes

if TYPE_CHECKING:
    from inflight.engine.core_client import EngineProcess

logger = logging.getLogger(__name__)

CUT_GRACE_SECONDS = 2.0  # time for a front end to end itself after a cut, in addition to the engine's CUT_SECONDS
LAST_SECONDS = 2.0  # time for a front end to exit after its last message


class FrontEndProcess:
    """The process of one front end, from its start to its end. Used on the event loop.

    Attributes:
        ready: the description of the model, once the front end can serve it. This future never gets an exception.
        ended: done when the process has closed its end of the socket.
        failure: why the process has ended, if it was not asked to end.
    """

    def __init__(self, index: int, listener: socket.socket, start: FrontEndStart, variables: dict[str, str]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.failure: InflightError | None = None
        self._is_asked_to_end = False
        self._received = b""
        self._socket, theirs = socket.socketpair()
        try:
            with start.to_file() as file:
                fds = [listener.fileno(), theirs.fileno(), file.fileno()]
                module = "inflight.entrypoints.serve.front_end_main"
                self.process = ChildProcess(f"inflight: front end {index}", module, fds, variables=variables)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        loop.add_reader(self._socket, self._read)

    def send(self, order: bytes, fds: Sequence[int] = ()) -> None:
        """Send an order. If the process has ended, nothing happens."""
        self._is_asked_to_end |= order in (DRAIN, CUT)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [order], list(fds))

    def close(self) -> None:
        """End the process if it still runs, and close its socket. Call it once."""
        asyncio.get_running_loop().remove_reader(self._socket)
        stop_processes([self.process], 0.0)
        self.process.close()
        self._socket.close()

    def _read(self) -> None:
        try:
            received = self._socket.recv(65536)
        except ConnectionResetError:
            received = b""
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"ready": description}:
                    self.ready.set_result(description)
                case {"failed": [name, message]}:
                    self.failure = error_by_name(name, message) or EngineError(
                        f"a front end could not start: {name}: {message}"
                    )
        if not received:
            asyncio.get_running_loop().remove_reader(self._socket)
            if self.failure is None and not self._is_asked_to_end:
                stop_processes([self.process], LAST_SECONDS)
                self.failure = EngineError(f"a front end has died ({self.process.state}); the others were drained")
            self.ended.set_result(None)


async def supervise(settings: ServerSettings, args: EngineArgs, listener: Listener, clock: StartUpClock) -> int:
    """Serve until a signal comes. Returns the exit code. No process is left running.

    Raises:
        ConfigError, EngineError: the engine or a front end could not start, or has died.
    """
    # the front ends have END_SECONDS to end; after that the engine has the same time
    shutdown = Shutdown(settings.shutdown_timeout, 2 * END_SECONDS)
    front_ends: list[FrontEndProcess] = []
    engine: EngineProcess | None = None

    async def start() -> None:
        nonlocal engine
        # These imports take long. The front ends run already, and answer health checks in the meantime.
        core_client = await asyncio.to_thread(importlib.import_module, "inflight.engine.core_client")
        engine_front_end = await asyncio.to_thread(importlib.import_module, "inflight.engine.front_end")
        config = await asyncio.to_thread(engine_front_end.resolve_config, args)
        clock.mark("importing")
        engine = core_client.EngineProcess(args, config, settings.api_server_count)
        assert engine is not None
        for front_end in front_ends:
            with engine.sockets.pop(0) as engine_socket:
                front_end.send(ENGINE, [engine_socket.fileno()])
        descriptions = [await front_end.ready for front_end in front_ends]
        clock.mark("engine and front ends")
        for front_end in front_ends:
            front_end.send(OPEN)
        text = "ready: %s serves %s, %d front ends, after %s"
        logger.info(text, settings.url, descriptions[0], len(front_ends), clock.summary())

    with (
        shutdown.on_signals(),
        tempfile.TemporaryDirectory(prefix="inflight-metrics-", ignore_cleanup_errors=True) as folder,
    ):
        try:
            for index in range(settings.api_server_count):
                front_end_start = FrontEndStart(settings=settings, args=args, records_engine=index == 0)
                variables = {"PROMETHEUS_MULTIPROC_DIR": folder}
                front_ends.append(FrontEndProcess(index, listener.socket, front_end_start, variables))
            if reads_files_again(settings):
                # A front end inherits that SIGHUP is ignored, so the signal cannot end it before it has a handler.
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _pass_on_sighup, front_ends)
            listener.socket.close()  # only front ends accept; when all of them have ended, the kernel refuses clients
            await _serve(asyncio.ensure_future(start()), front_ends, shutdown)
        finally:
            await _end(front_ends, engine, shutdown)
    if failed := [front_end.failure for front_end in front_ends if front_end.failure is not None]:
        raise failed[0]
    return shutdown.exit_code


def _pass_on_sighup(front_ends: Sequence[FrontEndProcess]) -> None:
    for front_end in front_ends:
        front_end.process.send_signal(signal.SIGHUP)


async def _serve(start: asyncio.Future[None], front_ends: Sequence[FrontEndProcess], shutdown: Shutdown) -> None:
    """Return when the shutdown begins or a front end ends, also during the start.

    Raises:
        ConfigError, EngineError: `start` has raised it.
    """
    begun: asyncio.Future[Any] = asyncio.ensure_future(shutdown.begun.wait())
    ends: list[asyncio.Future[Any]] = [begun, *(front_end.ended for front_end in front_ends)]
    try:
        await asyncio.wait([start, *ends], return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        begun.cancel()
        start.cancel()
        await asyncio.wait([start])


async def _end(front_ends: Sequence[FrontEndProcess], engine: EngineProcess | None, shutdown: Shutdown) -> None:
    """Drain the front ends, or cut them if `shutdown.cut` is set. When they have ended, end the engine."""
    for front_end in front_ends:
        front_end.send(DRAIN)
    if front_ends:
        ended: asyncio.Future[Any] = asyncio.ensure_future(asyncio.wait([front_end.ended for front_end in front_ends]))
        cut: asyncio.Future[Any] = asyncio.ensure_future(shutdown.cut.wait())
        await asyncio.wait([ended, cut], return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        if not ended.done():
            for front_end in front_ends:
                front_end.send(CUT)
        await asyncio.wait([ended], timeout=CUT_SECONDS + CUT_GRACE_SECONDS)
    stop_processes([front_end.process for front_end in front_ends], LAST_SECONDS)
    for front_end in front_ends:
        front_end.close()
    if engine is not None:
        await asyncio.to_thread(engine.close, *([CUT_SECONDS] if shutdown.cut.is_set() else []))
