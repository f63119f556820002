"""`CoreClient`: the stream to one process of the engine core, on a front end's event loop."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from typing import Protocol, cast

from inflight.errors import CodecError, EngineDeadError, EngineError, error_by_name
from inflight.interface.codec import Decoder, Message, encode
from inflight.interface.engine_view import EngineView
from inflight.interface.framing import Buffer, FrameReader
from inflight.interface.serving import (
    CachedBlocks,
    EndDamagedEngine,
    EngineDied,
    EngineOutputs,
    EngineReady,
    EngineStartFailed,
    PrefixCacheReset,
    ResetPrefixCache,
)
from inflight.interface.statistics import FaultStatus

PIECE_BYTES = 2**18  # about what one callback of the event loop gives to the transport
_ALLOWED = (
    EngineOutputs,
    EngineReady,
    EngineStartFailed,
    PrefixCacheReset,
    EngineDied,
    FaultStatus,
    CachedBlocks,
    EngineView,
)


class CoreClientListener(Protocol):
    """Who uses a `CoreClient`. The methods must return soon."""

    def take_outputs(self, message: EngineOutputs) -> None:
        """Called with each of these messages, in order, and never before `ready`."""

    def take_faults(self, status: FaultStatus) -> None: ...

    def take_cached(self, message: CachedBlocks) -> None: ...

    def take_view(self, view: EngineView) -> None: ...

    def core_ended(self, client: CoreClient, reason: str) -> None:
        """The connection has ended: the engine has failed, its process is gone, or `close` or `end` was called. Called once."""


class CoreClient(asyncio.BufferedProtocol):
    """
    Attributes:
        ready: a future that is resolved when the engine has started. If the engine could not start, the future raises the error
            that was raised in the engine's process.
        closed: a future that is resolved when the connection has ended.
        reason: why the connection has ended, if it has.
        has_defect: whether `end` has closed the connection because of a defect in this process.
        summary: why the engine has failed, as clients may see it. "" if it has not failed, or if there is no such text.
    """

    def __init__(self, listener: CoreClientListener) -> None:
        self._listener = listener
        self.has_defect = False
        self._reader = FrameReader()
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._outgoing: deque[Buffer] = deque()  # what waits for the transport
        self._is_full = False  # whether the transport takes nothing now
        self.reason = "the engine's process is gone"
        self.summary = ""
        self._call_ids = itertools.count()
        self._resets: dict[int, asyncio.Future[None]] = {}
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineReady] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    async def connect(self, engine_socket: socket.socket) -> None:
        """Use this socket. From now on the client owns it."""
        engine_socket.setblocking(False)
        loop = asyncio.get_running_loop()
        is_local = engine_socket.family == socket.AF_UNIX
        await (loop.create_unix_connection if is_local else loop.create_connection)(lambda: self, sock=engine_socket)

    def send(self, message: Message) -> None:
        """Send a message. Never waits. If the stream has ended, nothing is sent.

        An image has many megabytes. Some transports copy what the kernel does not take at once, so each callback gives them
        only a piece.
        """
        if self._transport is None or self._transport.is_closing():
            return
        was_idle = not self._outgoing
        for buffer in encode(message).buffers():
            view = memoryview(buffer)
            self._outgoing += (view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
        if was_idle:
            self._write()

    def _write(self) -> None:
        """Give the transport the next pieces, if it takes any: fewer than 2 * PIECE_BYTES."""
        if self._transport is None or self._is_full or not self._outgoing:
            return
        pieces: list[Buffer] = []
        size = 0
        while self._outgoing and size < PIECE_BYTES:
            piece = self._outgoing.popleft()
            pieces.append(piece)
            size += len(piece)
        self._transport.writelines(pieces)
        if self._outgoing and not self._is_full:
            asyncio.get_running_loop().call_soon(self._write)

    async def reset_prefix_cache(self, *, reset_connector: bool) -> None:
        """Ask the engine to forget its cached blocks. Returns when the engine has done this.

        Raises:
            EngineDeadError: the connection ended before the engine's answer.
        """
        if self.closed.done():
            raise EngineDeadError(self.reason)
        call_id = next(self._call_ids)
        self._resets[call_id] = asyncio.get_running_loop().create_future()
        self.send(ResetPrefixCache(call_id=call_id, with_connector=reset_connector))
        await self._resets[call_id]

    def pause(self) -> None:
        """Stop reading. Until `resume` is called, the engine keeps its outputs and merges those of one sequence."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def end(self, reason: str) -> None:
        """Close the connection because of a defect in this process. `core_ended` is called with this reason."""
        self.has_defect = True
        self.reason = reason
        self.close()

    # -- asyncio's calls -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from asyncio's

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.received(nbytes):
                self._receive(self._decoder.decode(frame, _ALLOWED))
        except CodecError as error:
            self.reason = f"the engine's process sent bytes that are not a valid message: {error}"
            self.send(EndDamagedEngine(reason=str(error)))
            if self._transport is not None:
                self._transport.writelines(self._outgoing)
                self._outgoing.clear()
                self._transport.close()  # when the last message is sent

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._outgoing.clear()
        if not self.ready.done():
            self.ready.set_exception(EngineDeadError(self.reason))
        if not self.ready.cancelled():
            self.ready.exception()  # reads the exception: asyncio logs an exception that nobody has read
        for reset in self._resets.values():
            if not reset.done():
                reset.set_exception(EngineDeadError(self.reason))
        self._resets.clear()
        self.closed.set_result(None)
        self._listener.core_ended(self, self.reason)

    def _receive(self, message: Message) -> None:
        match message:
            case EngineOutputs():
                self._listener.take_outputs(message)
            case EngineReady():
                self.ready.set_result(message)
            case EngineStartFailed():
                name, text = message.failure.type_name, message.failure.message
                unknown = EngineError(f"the engine could not start: {name}: {text}")
                self.ready.set_exception(error_by_name(name, text) or unknown)
            case PrefixCacheReset():
                reset = self._resets.pop(message.call_id, None)
                if reset is not None and not reset.done():
                    reset.set_result(None)
            case EngineDied():
                self.summary = message.summary
                # do not wait for the end of the process, which may take seconds
                self.reason = f"the engine has failed: {message.reason}"
                self.close()
            case FaultStatus():
                self._listener.take_faults(message)
            case CachedBlocks():
                self._listener.take_cached(message)
            case EngineView():
                self._listener.take_view(message)
