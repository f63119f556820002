"""The front end's side of the engine core's process: `EngineProcess` starts and ends it, `CoreClient` talks to it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.errors import CodecError, EngineDeadError, EngineError, InflightError, error_by_name
from inflight.executor.process import ChildProcess, stop_processes
from inflight.executor.transport import BlockingStream
from inflight.interface.codec import Decoder, Message, encode
from inflight.interface.framing import FrameReader
from inflight.interface.messages import WorkerFailure
from inflight.interface.serving import (
    EngineDied,
    EngineOutputs,
    EngineReady,
    EngineStartFailed,
    PrefixCacheReset,
    StartEngine,
)

logger = logging.getLogger(__name__)

TITLE = "inflight: engine"
MAX_END_SECONDS = 20.0  # that a process takes to end by itself: its workers have 5, a step that hangs 15
SOCKET_BUFFER_BYTES = 2**20


class EngineProcess:
    """The engine core in a process of its own, which loads the model from now on. Ends when all of `sockets` are closed.

    Args:
        num_front_ends: how many will talk to it.

    Attributes:
        sockets: one for each front end. Whoever gets one owns it; here it is to be closed when it has been handed on.
    """

    def __init__(self, args: EngineArgs, config: EngineConfig, num_front_ends: int = 1) -> None:
        pairs = [socket.socketpair() for _ in range(num_front_ends)]
        self.sockets = [ours for ours, _ in pairs]
        try:
            for ours, theirs in pairs:
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            fds = [theirs.fileno() for _, theirs in pairs]
            self.process = ChildProcess(TITLE, "inflight.engine.core_main", fds, keeps_secrets=True)
        except BaseException:
            for ours in self.sockets:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        start = StartEngine(config=config, tokenizer=args.tokenizer, skip_tokenizer_init=args.skip_tokenizer_init)
        try:
            BlockingStream(self.sockets[0]).send(start)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise EngineDeadError(f"the engine's process is gone: {self.process.state}") from error
            raise

    def close(self, grace_seconds: float = MAX_END_SECONDS) -> None:
        """Close the sockets that are still here, and wait for the end of the process; then kill it. To be called once."""
        for ours in self.sockets:
            ours.close()
        stop_processes([self.process], grace_seconds)
        self.process.close()


class CoreClient(asyncio.BufferedProtocol):
    """One front end's stream, on the event loop.

    Args:
        on_outputs: called with each `EngineOutputs`, in order; it must return soon.
        on_end: called once, with the reason, when the engine's process has failed or is gone, or `close` was called.

    Attributes:
        ready: the engine's start. An `InflightError` if that failed, as it was raised there.
        closed: done when the stream has ended.
        summary: why the engine has failed, in words that a client may see; "" before that, and if it is not known.
    """

    def __init__(self, on_outputs: Callable[[EngineOutputs], None], on_end: Callable[[str], None]) -> None:
        self._on_outputs, self._on_end = on_outputs, on_end
        self._reader = FrameReader()
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._reason = "the engine's process is gone"
        self.summary = ""
        self._resets: dict[int, asyncio.Future[None]] = {}
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineReady] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    async def connect(self, engine_socket: socket.socket) -> None:
        """Takes the socket over."""
        engine_socket.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=engine_socket)

    def send(self, message: Message) -> None:
        """Never waits. Nothing happens once the stream has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(encode(message).buffers())

    def expect_reset(self, call_id: int) -> asyncio.Future[None]:
        """Done when the engine has answered the `ResetPrefixCache` with this id."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resets[call_id] = future
        return future

    def pause(self) -> None:
        """Read no further: what comes waits in the engine, merged."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def end(self, reason: str) -> None:
        """`close`; `on_end` is told why."""
        self._reason = reason
        self.close()

    # -- asyncio's calls -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of no class of asyncio's

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.received(nbytes):
                self._receive(self._decoder.decode(frame, _ALLOWED))
        except CodecError as error:
            self.end(f"the engine's process sent a damaged frame: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.ready.done():
            self.ready.set_exception(EngineDeadError(self._reason))
        if not self.ready.cancelled():
            self.ready.exception()  # whoever waits for it has it; nobody else needs it
        for reset in self._resets.values():
            if not reset.done():
                reset.set_exception(EngineDeadError(self._reason))
        self._resets.clear()
        self.closed.set_result(None)
        self._on_end(self._reason)

    def _receive(self, message: Message) -> None:
        match message:
            case EngineOutputs():
                self._on_outputs(message)
            case EngineReady():
                self.ready.set_result(message)
            case EngineStartFailed():
                self.ready.set_exception(start_error(message.failure))
            case PrefixCacheReset():
                reset = self._resets.pop(message.call_id, None)
                if reset is not None and not reset.done():
                    reset.set_result(None)
            case EngineDied():
                self.summary = message.summary
                self.end(f"the engine has failed: {message.reason}")  # its process may take seconds to its end


_ALLOWED = (EngineOutputs, EngineReady, EngineStartFailed, PrefixCacheReset, EngineDied)


def start_error(failure: WorkerFailure) -> InflightError:
    """What the engine's process raised as it started, of the same class where that needs no more than a message."""
    return error_by_name(failure.type_name, failure.message) or EngineError(
        f"the engine could not start: {failure.type_name}: {failure.message}"
    )
