"""`EngineClient`: everything that a front end keeps for one engine. It outlives the engine's process.

    starting  --EngineReady-->  connected  --the stream ends-->  lost  --a new process sends EngineReady-->  connected
                                  |--closed, or a defect          |--given up, or the time is over
                                  v                               v
                                ended                           ended

With `FaultToleranceConfig.enabled=False`, a connection that ends is not made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import cast

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.serving.admission import Admission, QueueLimits
from inflight.engine.serving.backlog import Backlog
from inflight.engine.serving.cached_index import CachedIndex
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.engine.serving.output_lengths import OutputLengths
from inflight.engine.serving.readiness import ReadinessCheck
from inflight.errors import (
    CodecError,
    EngineDeadError,
    EngineError,
    EngineRecoveringError,
    InflightError,
    error_by_name,
)
from inflight.interface.codec import Decoder, Message, encode
from inflight.interface.framing import FrameReader
from inflight.interface.request import EngineCoreOutput
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

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # the front end waits so much longer than the owner of the engine's process, to be told the reason
_ALLOWED = (EngineOutputs, EngineReady, EngineStartFailed, PrefixCacheReset, EngineDied, FaultStatus, CachedBlocks)


class EngineState(Enum):
    STARTING = "starting"
    CONNECTED = "connected"
    LOST = "lost"
    ENDED = "ended"


class EngineClient:
    """Used on the event loop.

    Attributes:
        index: the place of the replica among those of this front end, from 0 on.
        number: its number among the replicas of all servers. Default: `index`.
        is_remote: whether it runs on another machine, which may be away for any time, and come back.
        state: see the drawing.
        summary: why the engine has failed, as clients may see it; "" if there is no such text.
        admission: which requests the engine's queue has room for. It counts from zero again for each process of the engine.
        readiness: whether the engine makes steps.
        backlog: outputs that are not processed yet. They are processed before `on_lost` or `on_end` is called.
        cached: the names of the blocks in the engine's prefix cache. Empty if requests are not routed by them.
        has_seen_process: whether there was a process since this client was made. If not, the engine was given up before.
        num_requests: unfinished requests at this engine.
        process: called with outputs, in order, in short slices (see `Backlog`).
        on_outputs: called with each `EngineOutputs`, in order, before its outputs are processed.
        on_faults: called with the `FaultStatus` whenever it changes.
        on_lost: called with the reason when the engine's process is lost and another one will be started.
        on_restored: called when the other process is ready. It has no requests.
        on_end: called once, with the reason, when the connection has ended for good.
    """

    def __init__(
        self,
        sockets: EngineSockets,
        config: FaultToleranceConfig,
        *,
        index: int = 0,
        number: int | None = None,
        is_remote: bool = False,
        limits: QueueLimits | None = None,
        lengths: OutputLengths | None = None,
        max_num_seqs: int = 1,
        step_budget: float = 60.0,
    ) -> None:
        """`max_num_seqs` are the engine's slots, `step_budget` is how many seconds one of its steps may take."""
        self.process: Callable[[Sequence[EngineCoreOutput]], None] = lambda _: None
        self.on_outputs: Callable[[EngineOutputs], None] = lambda _: None
        self.on_faults: Callable[[FaultStatus], None] = lambda _: None
        self.on_lost: Callable[[str], None] = lambda _: None
        self.on_restored: Callable[[], None] = lambda: None
        self.on_end: Callable[[str], None] = lambda _: None
        self.index, self.number, self.is_remote = index, index if number is None else number, is_remote
        self.state = EngineState.STARTING
        self.summary = ""
        self.admission = Admission(limits or QueueLimits(), max_num_seqs, lengths)
        self.readiness = ReadinessCheck(step_budget)
        self.backlog = Backlog(self, lambda outputs: self.process(outputs))
        self.cached = CachedIndex()
        self.has_seen_process = False
        self.num_requests = 0
        self._busy_since = 0.0  # the time since which `num_requests` has not been 0, or a new process has them
        self._sockets = sockets
        self._config = config
        self._client = CoreClient()
        self._reason = ""  # why the engine's process was lost, or why the connection has ended
        self._status = FaultStatus()
        self._is_closing = False
        self._reconnecting: asyncio.Task[None] | None = None

    async def open(self) -> EngineReady:
        """Connect to the engine, and wait until it has started. If its process dies meanwhile, wait for the next process.

        Raises:
            InflightError: the engine was given up. If it could not start, this is the error raised in its process.
        """
        try:
            self._client = await self._connect()
        except EngineDeadError as error:
            if self.is_remote:
                self._lose(str(error))
                self._reconnecting = asyncio.create_task(self._reconnect())
            elif not self.has_seen_process:
                self._finish(str(error))
            raise
        self.state = EngineState.CONNECTED
        return self._client.ready.result()

    @property
    def is_connected(self) -> bool:
        return self.state is EngineState.CONNECTED

    @property
    def makes_steps(self) -> bool:
        """Whether requests run now: the engine is connected, and does not recover from the loss of a rank."""
        return self.is_connected and self._status.state == "healthy"

    @property
    def busy_since(self) -> float | None:
        """Since when the engine has requests; None if it has none."""
        return self._busy_since if self.num_requests else None

    @property
    def fault_status(self) -> FaultStatus:
        if self.state is EngineState.LOST:
            return replace(self._status, state="recovering", last_cause=self._reason, last_kind="engine_died")
        return self._status

    def note_begun(self) -> None:
        """Note that a request was given to this engine."""
        if not self.num_requests:
            self._busy_since = time.monotonic()
        self.num_requests += 1

    def note_left(self) -> None:
        """Note that a request has ended, or was given to another engine."""
        self.num_requests -= 1

    def send(self, message: Message) -> None:
        """Send a message. Never waits. While the connection is lost, nothing is sent."""
        self._client.send(message)

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Ask the engine to forget its cached blocks. A new process has none.

        Raises:
            EngineDeadError: the connection has ended for good.
        """
        if self.is_connected:
            with contextlib.suppress(EngineDeadError):
                await self._client.reset_prefix_cache(reset_connector=reset_connector)
        if self.state is EngineState.ENDED:
            raise EngineDeadError(self._reason)

    def pause(self) -> None:
        self._client.pause()

    def resume(self) -> None:
        self._client.resume()

    def end(self, reason: str) -> None:
        """Close the connection for good, because of a defect in this process. `on_end` is called with this reason."""
        self._is_closing = True
        self._client.end(reason)

    async def close(self) -> None:
        """Close the connection, and wait until it is closed. Idempotent."""
        self._is_closing = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait([self._reconnecting])
        if self.state is EngineState.LOST:
            self._finish(self._reason)
        if self.has_seen_process:
            self._client.close()
            await self._client.closed
        self._sockets.close()

    async def _connect(self) -> CoreClient:
        """Connect to the first of the processes to come that starts.

        Raises:
            InflightError: the engine was given up. The error says why the last process could not start, if it has told it.
        """
        failure: InflightError | None = None
        tell: Callable[[], None] | None = (
            None  # logs the failure, which nobody else does while there are further processes
        )
        while True:
            try:
                engine_socket = await self._sockets.get(tell)
            except EngineDeadError as error:
                raise failure or error from None
            self.has_seen_process = True
            client = CoreClient()
            client.on_outputs, client.on_cached = self._take_outputs, self.cached.apply
            client.on_faults = self._note_faults
            client.on_end = partial(self._ended, client)
            await client.connect(engine_socket)
            try:
                await client.ready
                if not client.closed.done():
                    return client
            except EngineDeadError:  # the owner of the process tells the reason
                failure = tell = None
            except InflightError as error:
                failure = error
                tell = partial(logger.warning, "engine %d could not start: %s", self.number, error)
            except BaseException:
                client.close()
                raise

    def _take_outputs(self, message: EngineOutputs) -> None:
        if message.stats is not None:
            self.admission.reported(message.stats, message.num_received)
        self.on_outputs(message)
        self.readiness.note(message.outputs, message.stats)
        self.backlog.extend(message.outputs)

    def _note_faults(self, status: FaultStatus) -> None:
        self._status = status
        self.on_faults(self.fault_status)

    def _ended(self, client: CoreClient, reason: str) -> None:
        if client is not self._client or self.state is not EngineState.CONNECTED:
            return  # nobody uses this client yet: `_connect` finds that it has ended
        self.summary = client.summary
        if self._is_closing or client.has_defect or not self._config.enabled:
            self._finish(reason)
            return
        self._lose(reason)
        self._reconnecting = asyncio.create_task(self._reconnect())

    def _lose(self, reason: str) -> None:
        self.state, self._reason = EngineState.LOST, reason
        self.on_faults(self.fault_status)
        self.backlog.finish()  # deliver the outputs that have already arrived
        self.admission.restarted()
        self.cached.clear()
        self.readiness.end(EngineRecoveringError("the engine recovers from a fault (engine_died)"))
        self.on_lost(reason)

    def _restore(self) -> None:
        self.state, self._reason = EngineState.CONNECTED, ""
        self._busy_since = time.monotonic()
        self.admission.restarted()
        self.on_faults(self.fault_status)
        self.on_restored()

    def _finish(self, reason: str) -> None:
        if self.state is EngineState.ENDED:
            return
        self.state, self._reason = EngineState.ENDED, reason
        self._status = replace(self._status, state="failed")
        self.on_faults(self._status)
        self.backlog.finish()
        self.on_end(reason)

    async def _reconnect(self) -> None:
        begin, seconds = time.monotonic(), self._config.engine_recovery_timeout_sec
        try:
            async with asyncio.timeout(None if self.is_remote else seconds + GRACE_SECONDS):
                client = await self._connect()
        except TimeoutError:
            self._finish(f"{self._reason}; the engine did not start again within {seconds:g} s")
        except InflightError as error:
            self._finish(str(error))
        else:
            logger.info("the engine is there again, %.2f s after its process was lost", time.monotonic() - begin)
            self._client = client
            self._restore()


class CoreClient(asyncio.BufferedProtocol):
    """The stream to one process of the engine core, on the event loop.

    Attributes:
        on_outputs: called with each `EngineOutputs`, in order. It must return soon. It is never called before `ready`.
        on_end: called once, with the reason, when the connection has ended: the engine has failed, its process is gone, or
            `close` or `end` was called.
        ready: a future that is resolved when the engine has started. If the engine could not start, the future raises the error
            that was raised in the engine's process.
        closed: a future that is resolved when the connection has ended.
        reason: why the connection has ended, if it has.
        on_faults: called with each `FaultStatus`.
        on_cached: called with each `CachedBlocks`.
        has_defect: whether `end` has closed the connection because of a defect in this process.
        summary: why the engine has failed, as clients may see it. "" if it has not failed, or if there is no such text.
    """

    def __init__(self) -> None:
        self.on_outputs: Callable[[EngineOutputs], None] = lambda _: None
        self.on_end: Callable[[str], None] = lambda _: None
        self.on_faults: Callable[[FaultStatus], None] = lambda _: None
        self.on_cached: Callable[[CachedBlocks], None] = lambda _: None
        self.has_defect = False
        self._reader = FrameReader()
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
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
        """Send a message. Never waits. If the stream has ended, nothing is sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(encode(message).buffers())

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
        """Close the connection because of a defect in this process. `on_end` is called with this reason."""
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
                self._transport.close()  # when the last message is sent

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.ready.done():
            self.ready.set_exception(EngineDeadError(self.reason))
        if not self.ready.cancelled():
            self.ready.exception()  # reads the exception: asyncio logs an exception that nobody has read
        for reset in self._resets.values():
            if not reset.done():
                reset.set_exception(EngineDeadError(self.reason))
        self._resets.clear()
        self.closed.set_result(None)
        self.on_end(self.reason)

    def _receive(self, message: Message) -> None:
        match message:
            case EngineOutputs():
                self.on_outputs(message)
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
                self.on_faults(message)
            case CachedBlocks():
                self.on_cached(message)
