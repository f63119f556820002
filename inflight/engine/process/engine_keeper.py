"""`EngineKeeper`: watches the engine core's process, and starts it again if it dies or hangs.

If the configuration wants spare processes, there is a spare engine core, too: a process with its ranks' processes, which have
imported their libraries, and load no model before they are needed.

The server with one front end, `AsyncLLM` and the supervisor of several front ends each have one `EngineKeeper`. Every front end
gets a socket to each new process, and sends its unfinished requests again.
"""

import asyncio
import logging
import math
import signal
import socket
import time
from dataclasses import replace
from typing import NoReturn, Protocol

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.process.engine_process import EXIT_GIVEN_UP, EXIT_HEAD_LOST, MAX_END_SECONDS, EngineProcess
from inflight.errors import EngineDeadError
from inflight.interface.statistics import FaultCause, FaultStatus
from inflight.processes.child_process import pause_seconds
from inflight.processes.ping_watch import PING_SECONDS
from inflight.processes.recovery_limits import RecoveryLimits

logger = logging.getLogger(__name__)

SPARE_SECONDS = 2.0  # the spare starts this long after the present process was ready, so it does not slow requests down
OTHER_FAULT_SECONDS = 5.0  # a process that is killed from outside so late in its start is a new fault, with new time


class FrontEnd(Protocol):
    """A front end, as the keeper sees it."""

    def put(self, engine_socket: socket.socket) -> bool:
        """Give this front end its socket, which is connected to a new process of the engine. Returns False if the front end has
        ended."""

    def fail(self, error: EngineDeadError) -> None:
        """Tell the front end that there will be no other process of the engine."""


class EngineKeeper:
    """Used on the event loop.

    Attributes:
        process: the present process. None before `start`, and while another one cannot be started.
        status: the recoveries before the present process was started, and the deaths of front ends.
    """

    def __init__(self, args: EngineArgs, config: EngineConfig) -> None:
        self._args = args
        self._config = config
        self._front_ends: dict[int, FrontEnd] = {}
        self._num_front_ends = 0  # front ends added so far; also the next number, so no number is used twice
        self._limits = RecoveryLimits(config.fault_tolerance)
        self._watching: asyncio.Task[None] | None = None
        # ranks of other machines cannot wait for two engine cores
        tolerance = config.fault_tolerance
        self._wants_spare = tolerance.enabled and tolerance.spare_workers > 0 and config.parallel.nnodes == 1
        self._spare: EngineProcess | None = None
        self._spare_time = math.inf  # when a spare process may be started
        self.process: EngineProcess | None = None
        self._last_state = ""
        self._guilty: tuple[str, ...] = ()  # sequences that ran alone when processes were lost
        self._rank_recoveries: tuple[float, ...] = ()  # when the ranks of all processes so far recovered
        self._start_seconds = 0.0  # how long the first start took
        self.status = FaultStatus()
        self._given_up: EngineDeadError | None = None

    def add(self, front_end: FrontEnd) -> int:
        """Let a front end use the engine. It gets a socket now, if there is a process, and one to each later process. If the
        engine was given up, it is told so. Returns the front end's number."""
        number = self._num_front_ends
        self._num_front_ends += 1
        self._front_ends[number] = front_end
        if self._given_up is not None:
            front_end.fail(self._given_up)
        elif self.process is not None:
            self._connect(number, self.process)
        return number

    def _connect(self, number: int, process: EngineProcess) -> None:
        front_end = self._front_ends.get(number)
        if front_end is None:
            return  # it has died meanwhile
        engine_socket = process.connect(number, self.status.num_recoveries.get("front_end_died", 0))
        if engine_socket is not None:
            front_end.put(engine_socket)

    def remove(self, number: int) -> None:
        """Forget a front end that has died, and count its death."""
        del self._front_ends[number]
        self._count("front_end_died", f"front end {number} has died")

    def start(self) -> None:
        """Start the first process, and watch it.

        Raises:
            EngineDeadError: the process ended at once.
        """
        self._start_process(0.0)
        self._watching = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Start no more processes. `close` or `abandon` must follow."""
        if self._watching is not None:
            self._watching.cancel()
        for process in self._processes():
            process.unwatch()

    def abandon(self) -> None:
        """End the processes, in any thread, because the event loop has ended or does not run. See `EngineProcess.abandon`."""
        for process in self._processes():
            process.abandon()

    def _processes(self) -> list[EngineProcess]:
        return [process for process in (self._spare, self.process) if process is not None]

    async def close(self, grace_seconds: float = MAX_END_SECONDS) -> None:
        """End the process. Idempotent. If this is cancelled, `abandon` must follow."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            if not self._watching.cancelled():
                self._watching.exception()  # reads the exception: asyncio logs an exception that nobody has read
            self._watching = None
        await self._end_spare()
        if (process := self.process) is not None:
            await process.close(grace_seconds)
            self._last_state = process.state
            self.process = None

    async def failed(self) -> None:
        """Wait until the engine is given up. Call this after `start`.

        Raises:
            EngineDeadError: the engine was given up.
        """
        assert self._watching is not None
        await asyncio.shield(self._watching)

    @property
    def state(self) -> str:
        """Says whether the process runs, or how it ended."""
        return self._last_state if self.process is None else self.process.state

    @property
    def has_ended(self) -> bool:
        """Whether the present process has ended."""
        return self.process is not None and self.process.process.exit_code is not None

    def _start_process(self, fault_time: float) -> EngineProcess:
        """Let the spare process begin, or a new one if there is none."""
        process, self._spare = self._spare or EngineProcess(self._args, self._config), None
        process.begin(tuple(self._front_ends), self.status, fault_time, self._guilty, self._rank_recoveries)
        for number, front_end in self._front_ends.items():
            front_end.put(process.sockets.pop(number))
        self.process = process
        return process

    async def _keep_spare(self) -> None:
        """Start a spare process if it is missing, and look whether it hangs."""
        if self._spare is not None and self._spare.has_ended:
            logger.warning("the spare process of the engine has ended (%s)", self._spare.state)
            await self._end_spare()
        if self._spare is not None:
            self._spare.check()
        elif self._wants_spare and time.monotonic() > self._spare_time:
            try:
                self._spare = EngineProcess(self._args, self._config, is_spare=True)
            except (OSError, EngineDeadError) as error:
                logger.error("%s; the next try is in %g s", error, SPARE_SECONDS)
                self._spare_time = time.monotonic() + SPARE_SECONDS

    async def _end_spare(self) -> None:
        self._spare_time = time.monotonic() + SPARE_SECONDS
        if (spare := self._spare) is not None:
            spare.process.send_signal(signal.SIGKILL)  # it has nothing to lose
            await spare.close()
            self._spare = None

    def _count(self, cause: FaultCause, reason: str) -> None:
        counts = self.status.num_recoveries
        self.status = replace(
            self.status, num_recoveries={**counts, cause: counts.get(cause, 0) + 1}, last_cause=reason, last_kind=cause
        )

    async def _watch(self) -> None:
        """Start the process again whenever it ends.

        Raises:
            EngineDeadError: the engine was given up.
        """
        process = self.process
        assert process is not None
        begun = time.monotonic()
        await self._wait_for_end(process, until_ready=True)
        if not process.is_ready and not process.was_killed:
            self._give_up(f"the engine's process is gone: {process.state}")  # it could not start
        self._start_seconds = time.monotonic() - begun if process.is_ready else 0.0
        self._fix_cache_size(process)
        while True:
            await self._wait_for_end(process)
            process = await self._recover(process)

    def _fix_cache_size(self, process: EngineProcess) -> None:
        """Let later processes have a KV cache of the same size. If they measured again, they would find other numbers: beside
        the caches of other replicas, or while the memory of a lost process is not free yet."""
        if process.num_blocks:
            cache = replace(self._config.cache, num_blocks=process.num_blocks)
            self._config = replace(self._config, cache=cache)

    async def _wait_for_end(
        self, process: EngineProcess, *, until_ready: bool = False, deadline: float = math.inf
    ) -> None:
        """Return when the process has ended. With `until_ready` return also when it is ready. Kill a process that hangs, or
        that is not ready at `deadline`."""
        while not process.has_ended and not (until_ready and process.is_ready):
            if time.monotonic() > deadline:
                process.kill("it has not started in time")
                deadline = math.inf
            process.check()
            if process.is_ready:
                await self._keep_spare()
            for number in process.take_unconnected():  # it had no free descriptor
                self._connect(number, process)
            await process.wait_for_news(min(PING_SECONDS, max(deadline - time.monotonic(), 0.0)))
        self._spare_time = time.monotonic() + SPARE_SECONDS

    async def _recover(self, process: EngineProcess) -> EngineProcess:
        """Start other processes, until one is ready. This is one recovery, however many processes it needs.

        Raises:
            EngineDeadError: the engine was given up.
        """
        limits = self._config.fault_tolerance
        fault_time = time.monotonic()
        deadline = self._record_fault(process)
        num_failed = 0
        failure = ""
        share = 2  # the first start that hangs leaves half of the time for another one
        while True:
            process = await self._replace(process, fault_time, deadline)
            begun = time.monotonic()
            # a start that takes no longer than twice the first start is no hang
            allowed = max((deadline - begun) / share, 2 * self._start_seconds)
            await self._wait_for_end(process, until_ready=True, deadline=min(begun + allowed, deadline))
            now = time.monotonic()
            if process.is_ready:  # if it has ended since, that is another fault
                return process
            if now - begun >= allowed:
                share = 1  # perhaps the machine is slow, and then shorter and shorter starts would help nobody
            if process.was_lost and now - begun >= OTHER_FAULT_SECONDS:
                deadline = self._record_fault(process)
            num_failed, failure = num_failed + 1, process.failure or failure
            if now >= deadline:
                seconds = f"{limits.engine_recovery_timeout_sec:g} s"
                self._give_up(f"the engine did not start again within {seconds}: {failure or process.state}")
            await asyncio.sleep(min(pause_seconds(num_failed), deadline - now))

    def _record_fault(self, process: EngineProcess) -> float:
        """Note that the process is lost. Returns until when another one must be ready.

        Raises:
            EngineDeadError: no other process may be started.
        """
        limits = self._config.fault_tolerance
        reason = f"the engine's process is gone: {process.state}"
        if not limits.enabled or process.process.exit_code == EXIT_HEAD_LOST:
            self._give_up(reason)
        if process.process.exit_code == EXIT_GIVEN_UP:
            self._give_up(
                f"{reason}; its ranks had used all {limits.max_recoveries} recoveries that are allowed within one hour "
                "(max_recoveries)"
            )
        if problem := self._limits.problem():
            self._give_up(f"{reason}; {problem}")
        self._limits.record()
        self._take_faults(process)
        self._count("engine_died", reason)
        return time.monotonic() + limits.engine_recovery_timeout_sec

    def _take_faults(self, process: EngineProcess) -> None:
        """Take over what the process has told of its recoveries. It may not have heard of the newest deaths of front ends."""
        if process.faults is not None:
            known, told = self.status.num_recoveries, process.faults.num_recoveries
            counts = {cause: max(known.get(cause, 0), told.get(cause, 0)) for cause in {**known, **told}}
            self.status = replace(process.faults, num_recoveries=counts)
        self._rank_recoveries = process.recovery_times or self._rank_recoveries

    async def _replace(self, process: EngineProcess, fault_time: float, deadline: float) -> EngineProcess:
        """Start another process. Try again and again if the operating system cannot start one.

        Raises:
            EngineDeadError: the engine was given up.
        """
        if process.lone_request:
            logger.error(
                "request %s ends, because the engine's process was lost while only this request ran",
                process.lone_request,
            )
            self._guilty = (*self._guilty, process.lone_request)
        logger.error("the engine's process is gone: %s; it is started again", process.state)
        await process.close(0.0)  # when this is cancelled, `close` of this object closes the process
        self._last_state = process.state
        self.process = None
        num_failed = 0
        while True:
            try:
                return self._start_process(fault_time)
            except (OSError, EngineDeadError) as error:  # for example, there is no memory at this moment
                num_failed += 1
                pause = pause_seconds(num_failed)
                if time.monotonic() + pause > deadline:
                    self._give_up(f"the engine's process could not be started again: {error}")
                logger.error("%s; the next try is in %g s", error, pause)
                await asyncio.sleep(pause)

    def _give_up(self, reason: str) -> NoReturn:
        if self.process is not None:
            self.process.process.send_signal(signal.SIGKILL)  # a new process may still be loading
        self._given_up = error = EngineDeadError(reason)
        for front_end in self._front_ends.values():
            front_end.fail(error)
        raise error
