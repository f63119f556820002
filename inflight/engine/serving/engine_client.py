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
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Protocol

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.serving.admission import Admission, QueueLimits
from inflight.engine.serving.backlog import Backlog
from inflight.engine.serving.cached_index import CachedIndex
from inflight.engine.serving.client import Shares
from inflight.engine.serving.core_client import CoreClient
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.engine.serving.engine_views import EngineViews
from inflight.engine.serving.output_lengths import OutputLengths
from inflight.engine.serving.readiness import ReadinessCheck
from inflight.errors import EngineDeadError, EngineRecoveringError, InflightError
from inflight.interface.codec import Message
from inflight.interface.engine_view import EngineView
from inflight.interface.request import EngineCoreOutput
from inflight.interface.serving import CachedBlocks, EngineOutputs, EngineReady
from inflight.interface.statistics import FaultStatus

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # the front end waits so much longer than the owner of the engine's process, to be told the reason


class EngineState(Enum):
    STARTING = "starting"
    CONNECTED = "connected"
    LOST = "lost"
    ENDED = "ended"


class EngineListener(Protocol):
    """Who uses an `EngineClient`. The methods are called on the event loop, and must return soon."""

    def process(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Called with outputs, in order, in short slices (see `Backlog`)."""

    def outputs_arrived(self, engine: EngineClient, message: EngineOutputs) -> None:
        """Called with each of these messages, in order, before its outputs are processed."""

    def faults_changed(self, engine: EngineClient, status: FaultStatus) -> None: ...

    def engine_lost(self, engine: EngineClient, reason: str) -> None:
        """The engine's process is lost, and another one will be started."""

    def engine_restored(self, engine: EngineClient) -> None:
        """The other process is ready. It has no requests."""

    def engine_ended(self, engine: EngineClient, reason: str) -> None:
        """The connection has ended for good. Called once."""


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
        backlog: outputs that are not processed yet. They are processed before `engine_lost` or `engine_ended` is called.
        cached: the names of the blocks in the engine's prefix cache. Empty if requests are not routed by them.
        has_seen_process: whether there was a process since this client was made. If not, the engine was given up before.
        num_requests: unfinished requests at this engine.
    """

    def __init__(
        self,
        sockets: EngineSockets,
        config: FaultToleranceConfig,
        listener: EngineListener,
        *,
        index: int = 0,
        number: int | None = None,
        is_remote: bool = False,
        limits: QueueLimits | None = None,
        lengths: OutputLengths | None = None,
        shares: Shares | None = None,
        max_num_seqs: int = 1,
        step_budget: float = 60.0,
    ) -> None:
        """`max_num_seqs` are the engine's slots, `step_budget` is how many seconds one of its steps may take."""
        self.index = index
        self.number = index if number is None else number
        self.is_remote = is_remote
        self.state = EngineState.STARTING
        self.summary = ""
        self.admission = Admission(limits or QueueLimits(), max_num_seqs, lengths, shares)
        self.readiness = ReadinessCheck(step_budget)
        self.backlog = Backlog(self, listener.process)
        self.cached = CachedIndex()
        self.views = EngineViews(self.send)
        self.has_seen_process = False
        self.num_requests = 0
        self._busy_since = 0.0  # the time since which `num_requests` has not been 0, or a new process has them
        self._sockets = sockets
        self._config = config
        self._listener = listener
        self._client = CoreClient(self)
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

    def record_begun(self) -> None:
        """Note that a request was given to this engine."""
        if not self.num_requests:
            self._busy_since = time.monotonic()
        self.num_requests += 1

    def record_left(self) -> None:
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
        """Close the connection for good, because of a defect in this process. `engine_ended` is called with this
        reason."""
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
            client = CoreClient(self)
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

    # -- `CoreClientListener` ------------------------------------------------------------------------------------------

    def take_outputs(self, message: EngineOutputs) -> None:
        if message.stats is not None:
            self.admission.reported(message.stats, message.num_received)
        self._listener.outputs_arrived(self, message)
        self.readiness.record(message.outputs, message.stats)
        self.backlog.extend(message.outputs)

    def take_faults(self, status: FaultStatus) -> None:
        self._status = status
        self._listener.faults_changed(self, self.fault_status)

    def take_cached(self, message: CachedBlocks) -> None:
        self.cached.apply(message)

    def take_view(self, view: EngineView) -> None:
        self.views.take(view)

    def core_ended(self, client: CoreClient, reason: str) -> None:
        if client is not self._client or self.state is not EngineState.CONNECTED:
            return  # nobody uses this client yet: `_connect` finds that it has ended
        self.summary = client.summary
        if self._is_closing or client.has_defect or not self._config.enabled:
            self._finish(reason)
            return
        self._lose(reason)
        self._reconnecting = asyncio.create_task(self._reconnect())

    # -- losses --------------------------------------------------------------------------------------------------------

    def _lose(self, reason: str) -> None:
        self.state = EngineState.LOST
        self._reason = reason
        self._listener.faults_changed(self, self.fault_status)
        self.backlog.finish()  # deliver the outputs that have already arrived
        self.admission.restarted()
        self.cached.clear()
        self.readiness.end(EngineRecoveringError("the engine recovers from a fault (engine_died)"))
        self._listener.engine_lost(self, reason)

    def _restore(self) -> None:
        self.state = EngineState.CONNECTED
        self._reason = ""
        self._busy_since = time.monotonic()
        self.admission.restarted()
        self.views.renew()
        self._listener.faults_changed(self, self.fault_status)
        self._listener.engine_restored(self)

    def _finish(self, reason: str) -> None:
        if self.state is EngineState.ENDED:
            return
        self.state = EngineState.ENDED
        self._reason = reason
        self._status = replace(self._status, state="failed")
        self._listener.faults_changed(self, self._status)
        self.backlog.finish()
        self._listener.engine_ended(self, reason)

    async def _reconnect(self) -> None:
        begin = time.monotonic()
        seconds = self._config.engine_recovery_timeout_sec
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
