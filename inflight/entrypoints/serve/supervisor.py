"""`supervise`: several front ends before one engine, each a process of its own; all of them accept on the one listener.

    this process        owns the listener's address, the engine's process and the folder of the metrics; serves nobody
     |-- engine
     |-- front end 0    a `Server`; records what the engine says of itself
     |-- front end 1    a `Server`

They take requests once all of them are ready. A signal here drains, or cuts, them all. When one fails or dies, the others are
drained, and the command fails: whoever supervises it starts all of it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import socket
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve.control import CUT, DRAIN, ENGINE, OPEN, FrontEndStart
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, END_SECONDS, Shutdown
from inflight.entrypoints.serve.start_up import StartUpClock
from inflight.errors import EngineError, InflightError, error_by_name
from inflight.executor.process import ChildProcess, stop_processes

if TYPE_CHECKING:
    from inflight.entrypoints.serve.engine_launch import LaunchedEngine

logger = logging.getLogger(__name__)

CUT_GRACE_SECONDS = 2.0  # that a front end has beyond what it leaves the engine
LAST_SECONDS = 2.0  # that a front end has to exit after its last message


class FrontEndProcess:
    """One front end, from its start to its end; on the event loop.

    Attributes:
        ready: what it serves, once it could. Never an error.
        ended: its process has said its last word.
        failure: why, if nobody asked for that.
    """

    def __init__(self, index: int, listener: socket.socket, variables: dict[str, str]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.failure: InflightError | None = None
        self._is_asked_to_end = False
        self._received = b""
        self._socket, theirs = socket.socketpair()
        try:
            fds = [listener.fileno(), theirs.fileno()]
            module = "inflight.entrypoints.serve.front_end_main"
            self.process = ChildProcess(f"inflight: front end {index}", module, fds, variables=variables)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        loop.add_reader(self._socket, self._read)

    def start(self, start: FrontEndStart) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: `ended` says so
            start.send(self._socket)

    def send(self, order: bytes, fds: Sequence[int] = ()) -> None:
        """Nothing happens once it has ended."""
        self._is_asked_to_end |= order in (DRAIN, CUT)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [order], list(fds))

    def close(self) -> None:
        """The process has ended, or is ended now. To be called once."""
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
    """Serve until a signal; returns the exit code. Nothing is left running.

    Raises:
        ConfigError, EngineError: the engine or a front end could not start, or has died.
    """
    shutdown = Shutdown(
        settings.shutdown_timeout, 2 * END_SECONDS
    )  # END_SECONDS for the front ends, and then as much for the engine
    front_ends: list[FrontEndProcess] = []
    engine: LaunchedEngine | None = None

    async def start() -> None:
        nonlocal engine
        module = await asyncio.to_thread(importlib.import_module, "inflight.entrypoints.serve.engine_launch")
        config = await asyncio.to_thread(module.resolve_config, args)
        clock.mark("importing")
        engine = module.LaunchedEngine(args, config, settings.api_server_count)
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
                variables = {"PROMETHEUS_MULTIPROC_DIR": folder}
                front_ends.append(FrontEndProcess(index, listener.socket, variables))
                front_ends[-1].start(FrontEndStart(settings=settings, args=args, records_engine=index == 0))
            listener.socket.close()  # accepted on by them alone: when they are gone, clients are refused
            await _serve(asyncio.ensure_future(start()), front_ends, shutdown)
        finally:
            await _end(front_ends, engine, shutdown)
    if failed := [front_end.failure for front_end in front_ends if front_end.failure is not None]:
        raise failed[0]
    return shutdown.exit_code


async def _serve(start: asyncio.Future[None], front_ends: Sequence[FrontEndProcess], shutdown: Shutdown) -> None:
    """Until the shutdown begins or a front end ends, in the midst of the start, too.

    Raises:
        ConfigError, EngineError: what `start` raises.
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


async def _end(front_ends: Sequence[FrontEndProcess], engine: LaunchedEngine | None, shutdown: Shutdown) -> None:
    """Drain the front ends, or cut them, and end the engine."""
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
        await asyncio.to_thread(engine.close, is_cut=shutdown.cut.is_set())
