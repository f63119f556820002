"""`EngineConnection`: a front end's connection to the engine, which outlives the engine's process.

    connected  --the stream ends-->  lost  --a socket to a new process, and its EngineReady-->  connected
                                      |--the engine is given up, or the time is over-->  ended

With `FaultToleranceConfig.enabled=False`, a connection that ends is not made again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.core_client import CoreClient
from inflight.engine.engine_sockets import EngineSockets
from inflight.errors import EngineDeadError, InflightError
from inflight.interface.codec import Message
from inflight.interface.serving import EngineOutputs, EngineReady
from inflight.interface.statistics import FaultStatus

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # the front end waits so much longer than the owner of the engine's process, who knows the reason


class EngineConnection:
    """Used on the event loop.

    Attributes:
        on_outputs: called with each `EngineOutputs`, in order.
        on_faults: called with the `FaultStatus` whenever it changes.
        on_lost: called with the reason when the engine's process is lost and another one will be started.
        on_restored: called when the other process is ready. It has no requests.
        on_end: called once, with the reason, when the connection has ended for good.
        summary: why the engine has failed, as clients may see it; "" if there is no such text.
    """

    def __init__(self, sockets: EngineSockets, config: FaultToleranceConfig) -> None:
        self.on_outputs: Callable[[EngineOutputs], None] = lambda _: None
        self.on_faults: Callable[[FaultStatus], None] = lambda _: None
        self.on_lost: Callable[[str], None] = lambda _: None
        self.on_restored: Callable[[], None] = lambda: None
        self.on_end: Callable[[str], None] | None = None
        self.summary = ""
        self._sockets = sockets
        self._config = config
        self._client = CoreClient()
        self._status = FaultStatus()
        self._reason = ""  # why the connection was lost; "" while connected
        self._is_closing = False
        self._reconnecting: asyncio.Task[None] | None = None

    async def open(self) -> EngineReady:
        """Connect to the engine, and wait until it has started. If its process dies meanwhile, wait for the next process. Set
        `on_end` before the event loop runs again: without it the end of the process is not noticed.

        Raises:
            InflightError: the engine was given up. If it could not start, this is the error raised in its process.
        """
        self._client = await self._connect()
        return self._client.ready.result()

    @property
    def lost_because(self) -> str:
        """Why the engine's process was lost. "" while there is a process."""
        return self._reason

    @property
    def fault_status(self) -> FaultStatus:
        if self._reason:
            return replace(self._status, state="recovering", last_cause=self._reason, last_kind="engine_died")
        return self._status

    def send(self, message: Message) -> None:
        """Send a message. Never waits. While the connection is lost, nothing is sent."""
        self._client.send(message)

    async def reset_prefix_cache(self) -> None:
        """Ask the engine to forget its cached blocks. A new process has none.

        Raises:
            EngineDeadError: the connection has ended for good.
        """
        if not self._reason:
            try:
                await self._client.reset_prefix_cache()
            except EngineDeadError:
                if self.on_end is None:
                    raise

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
        if self._reason:
            self._finish(self._reason)
        self._client.close()
        await self._client.closed
        self._sockets.close()

    async def _connect(self) -> CoreClient:
        """Connect to the first of the processes to come that starts.

        Raises:
            InflightError: the engine was given up. The error says why the last process could not start, if it has told it.
        """
        failure: InflightError | None = None
        while True:
            try:
                engine_socket = await self._sockets.get()
            except EngineDeadError as error:
                raise failure or error from None
            client = CoreClient()
            client.on_outputs = lambda message: self.on_outputs(message)
            client.on_faults = self._note_faults
            client.on_end = partial(self._ended, client)
            await client.connect(engine_socket)
            try:
                await client.ready
                if not client.closed.done():
                    return client
            except EngineDeadError:  # the owner of the process tells the reason
                failure = None
            except InflightError as error:
                logger.warning("the engine could not start: %s", error)
                failure = error
            except BaseException:
                client.close()
                raise

    def _note_faults(self, status: FaultStatus) -> None:
        self._status = status
        self.on_faults(self.fault_status)

    def _ended(self, client: CoreClient, reason: str) -> None:
        if client is not self._client or self.on_end is None:
            return  # nobody uses this client yet: `_connect` finds that it has ended
        self.summary = client.summary
        if self._is_closing or client.has_defect or not self._config.enabled:
            self._finish(reason)
            return
        self._reason = reason
        self.on_faults(self.fault_status)
        self.on_lost(reason)
        self._reconnecting = asyncio.create_task(self._reconnect())

    def _finish(self, reason: str) -> None:
        self._reason = ""
        self._status = replace(self._status, state="failed")
        self.on_faults(self._status)
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end(reason)

    async def _reconnect(self) -> None:
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self._config.engine_recovery_timeout_seconds + GRACE_SECONDS):
                client = await self._connect()
        except TimeoutError:
            seconds = self._config.engine_recovery_timeout_seconds
            self._finish(f"{self._reason}; the engine did not start again within {seconds:g} s")
        except InflightError as error:
            self._finish(str(error))
        else:
            logger.info("the engine is there again, %.2f s after its process was lost", time.monotonic() - begin)
            self._client, self._reason = client, ""
            self.on_faults(self.fault_status)
            self.on_restored()
