"""`supervise`: starts, watches and ends several front ends (processes that serve HTTP), which share one engine.

    this process        owns the listener's address, the engine's process and the folder of the metrics; serves no request
     |-- engine         with --data-parallel-size, one for each replica
     |-- front end 0    a `Server`; records the engine's statistics
     |-- front end 1    a `Server`

All front ends accept connections on the same listener. They answer requests once all of them are ready. After the first signal
to this process, the front ends drain: they refuse new requests, and let running requests end. After the second signal, they cut
their connections.

The supervisor looks after each front end from its first moment to its last. One that is stopped by a signal is killed. If a
front end dies, also during the start, its requests are lost with its connections, and another front end takes its place. One
that dies again before it was ready is the same fault: the tries follow more and more slowly, for as long as a recovery may
take. If the engine dies, `EngineKeeper` starts it again.

If the engine or a front end may not be started again (`FaultToleranceConfig`), or if a front end reports a failure, the
remaining front ends drain, and `inflight serve` fails. Then systemd or Kubernetes starts it again.
"""

import asyncio
import contextlib
import importlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve.front_end_main import CUT, DRAIN, OPEN, FrontEndStart
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.metric_files import metric_files
from inflight.entrypoints.serve.server import StartUpClock, reads_files_again
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, END_SECONDS, Shutdown
from inflight.entrypoints.serve.terminal import ServerTerminal
from inflight.errors import EngineDeadError, EngineError, InflightError, error_by_name
from inflight.processes.child_process import STOPPED_LOOK_SECONDS, ChildProcess, pause_seconds, stop_processes
from inflight.processes.line_wire import LineWire
from inflight.processes.recovery_limits import RecoveryLimits
from inflight.sockets import socket_pair

if TYPE_CHECKING:
    from inflight.engine.process.remote_replica import Keeper

logger = logging.getLogger(__name__)

CUT_GRACE_SECONDS = 2.0  # time for a front end to end itself after a cut, in addition to the engine's CUT_SECONDS
LAST_SECONDS = 2.0  # time for a front end to exit after its last message


class FrontEndProcess:
    """The process of one front end, from its start to its end. Used on the event loop.

    Attributes:
        ready: the description of the model, once the front end can serve it. This future never gets an exception.
        ended: done when the process has closed its end of the socket.
        failure: why the process has ended, if it was not asked to end.
        has_died: whether the process has ended without a report, and was not asked to end.
        number: its number in each `EngineKeeper`; -1 before it has one.
        is_replacement: see `FrontEndStart`.

    Args:
        title, module: of the process; by default those of a front end. The process of a model is one, too (router/).
        make_process: gets the arguments of `ChildProcess`, which is the default.
    """

    def __init__(
        self,
        index: int,
        listener: socket.socket,
        start: FrontEndStart,
        variables: dict[str, str],
        *,
        title: str | None = None,
        module: str = "inflight.entrypoints.serve.front_end_main",
        make_process: Callable[..., ChildProcess] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.failure: InflightError | None = None
        self.has_died = False
        self.index = index
        self.number = -1
        self.is_replacement = start.is_replacement
        self._is_asked_to_end = False
        with socket_pair() as (self._socket, theirs), start.to_file() as file:
            fds = [listener.fileno(), theirs.fileno(), file.fileno()]
            make = make_process or ChildProcess
            self.process = make(title or f"inflight: front end {index}", module, fds, variables=variables)
        self._wire = LineWire(self._socket)
        loop.add_reader(self._socket, self._read)

    def send(self, order: str | dict[str, int], fds: Sequence[int] = ()) -> bool:
        """Send an order (front_end_main.py). Returns False if the process has ended."""
        self._is_asked_to_end |= order in (DRAIN, CUT)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._wire.send(order, fds)
            return True
        return False

    def close(self) -> None:
        """End the process if it still runs, and close its socket. Call it once."""
        asyncio.get_running_loop().remove_reader(self._socket)
        stop_processes([self.process], 0.0)
        self.process.close()
        self._socket.close()

    def _read(self) -> None:
        has_ended = False
        arrived = []
        try:
            arrived = self._wire.receive()
        except (EOFError, ConnectionResetError):
            has_ended = True
        for report, _ in arrived:
            match report:
                case {"ready": description}:
                    self.ready.set_result(description)
                case {"failed": [name, message]}:
                    unknown = EngineError(f"a front end could not start: {name}: {message}")
                    self.failure = error_by_name(name, message) or unknown
        if has_ended:
            asyncio.get_running_loop().remove_reader(self._socket)
            if self.failure is None and not self._is_asked_to_end:
                stop_processes([self.process], LAST_SECONDS)
                self.has_died = True
                self.failure = EngineError(f"a front end has died ({self.process.state}); the others were drained")
            self.ended.set_result(None)


@dataclass(frozen=True)
class _Seat:
    """A front end, as the keeper of replica `index` sees it."""

    front_end: FrontEndProcess
    index: int

    def put(self, engine_socket: socket.socket) -> bool:
        """Hand over the socket to a new process of the replica. Returns False if the front end has ended."""
        with engine_socket:
            return self.front_end.send({"engine": self.index}, [engine_socket.fileno()])

    def fail(self, error: EngineDeadError) -> None:
        """Tell the front end that the replica is given up."""
        self.front_end.send({"gone": self.index})


async def supervise(
    settings: ServerSettings,
    args: EngineArgs,
    listener: Listener,
    clock: StartUpClock,
    terminal: ServerTerminal | None = None,
) -> int:
    """Serve until a signal comes. Returns the exit code. No process is left running.

    Raises:
        ConfigError, EngineError: the engine or a front end could not start, or has died.
    """
    # the front ends have END_SECONDS to end; after that the engine has the same time
    shutdown = Shutdown(settings.shutdown_timeout, 2 * END_SECONDS)
    with shutdown.on_signals(), metric_files(settings.api_server_count) as folder:
        supervisor = Supervisor(settings, args, listener, shutdown, folder, terminal)
        try:
            supervisor.start_front_ends()
            await supervisor.serve(clock)
        finally:
            was_told_to_end = shutdown.begun.is_set()
            await supervisor.end()
    for front_end in supervisor.front_ends:
        if front_end.failure is None:
            continue
        if not (front_end.has_died and was_told_to_end):
            raise front_end.failure
        logger.error("%s", front_end.failure)  # without the shutdown another one would have taken its place
    return shutdown.exit_code


@dataclass
class _Fault:
    """The death of a front end: until when another one must be ready, and how many tries have failed."""

    deadline: float
    num_failed: int = 0


class Supervisor:
    """Owns the processes. `folder` is for the metrics of all front ends. Call each method once, in this order."""

    def __init__(
        self,
        settings: ServerSettings,
        args: EngineArgs,
        listener: Listener,
        shutdown: Shutdown,
        folder: str,
        terminal: ServerTerminal | None = None,
    ) -> None:
        self.front_ends: list[FrontEndProcess] = []
        self._settings = settings
        self._args = args
        self._listener = listener
        self._shutdown = shutdown
        self._folder = folder
        self._terminal = terminal
        self._keepers: list[Keeper] = []  # one for each replica; empty before they are started
        self._limits: RecoveryLimits | None = None  # None if no front end may be replaced
        self._faults: dict[int, _Fault] = {}  # index of a front end -> its newest death
        self._is_configured: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # so `_limits` is known
        self._is_open = False  # whether the front ends answer requests
        self._looking: asyncio.Task[None] | None = None
        self._opening: set[asyncio.Task[None]] = set()

    def start_front_ends(self) -> None:
        self.front_ends += map(self._start_front_end, range(self._settings.api_server_count))
        self._looking = asyncio.create_task(self._look_after())
        if self._terminal is not None:
            # A front end inherits that SIGHUP is ignored, so the signal cannot end it before it has a handler.
            read_again = self._pass_hangup_on if reads_files_again(self._settings) else None
            self._terminal.on_hangup(self._shutdown.begin, read_again)

    async def _look_after(self) -> None:
        """Kill front ends that are stopped by a signal, from the start until the last one has ended."""
        while True:
            await asyncio.sleep(STOPPED_LOOK_SECONDS)
            for front_end in self.front_ends:
                if not front_end.ended.done():
                    front_end.process.kill_if_stopped()

    async def serve(self, clock: StartUpClock) -> None:
        """Start the engine. Replace front ends that die. Return when the shutdown begins, or when a front end has ended and
        cannot be replaced.

        Raises:
            ConfigError, EngineError: the engine could not start, or was given up.
        """
        begun: asyncio.Future[Any] = asyncio.ensure_future(self._shutdown.begun.wait())
        engine = asyncio.ensure_future(self._run_engine(clock))
        try:
            while not begun.done():
                ends = [front_end.ended for front_end in self.front_ends]
                await asyncio.wait([begun, engine, *ends], return_when=asyncio.FIRST_COMPLETED)
                if engine.done():
                    engine.result()
                for index, front_end in enumerate(self.front_ends):
                    if front_end.ended.done() and not await self._replace(index, [begun, engine]):
                        return
        finally:
            begun.cancel()
            engine.cancel()
            await asyncio.wait([engine])

    async def end(self) -> None:
        """Drain the front ends, or cut them if `shutdown.cut` is set. One that does not end in time is cut, and then killed.
        When all have ended, end the engine."""
        self._listener.socket.close()  # when all front ends have ended, too, the kernel refuses clients
        for task in self._opening:
            task.cancel()
        for front_end in self.front_ends:
            front_end.send(DRAIN)
        if self.front_ends:
            ends = [front_end.ended for front_end in self.front_ends]
            ended: asyncio.Future[Any] = asyncio.ensure_future(asyncio.wait(ends))
            cut: asyncio.Future[Any] = asyncio.ensure_future(self._shutdown.cut.wait())
            seconds = self._settings.shutdown_timeout + CUT_SECONDS + CUT_GRACE_SECONDS
            await asyncio.wait([ended, cut], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            cut.cancel()
            if not ended.done():
                for front_end in self.front_ends:
                    front_end.send(CUT)
            await asyncio.wait([ended], timeout=CUT_SECONDS + CUT_GRACE_SECONDS)
        if self._looking is not None:
            self._looking.cancel()
        stop_processes([front_end.process for front_end in self.front_ends], LAST_SECONDS)
        for front_end in self.front_ends:
            front_end.close()
        grace = [CUT_SECONDS] if self._shutdown.cut.is_set() else []
        await asyncio.gather(*(keeper.close(*grace) for keeper in self._keepers))

    async def _run_engine(self, clock: StartUpClock) -> None:
        """Start the engine, and let the front ends answer requests when all are ready. Wait until the engine is given up.

        Raises:
            ConfigError, EngineError: the engine could not start, or was given up.
        """
        # These imports take long. The front ends run already, and answer health checks in the meantime.
        keepers = await asyncio.to_thread(importlib.import_module, "inflight.engine.process.remote_replica")
        model_files = await asyncio.to_thread(importlib.import_module, "inflight.engine.start.model_files")
        config = await asyncio.to_thread(model_files.resolve_config, self._args)
        clock.mark("importing")
        self._keepers = await keepers.make_keepers(self._args, config)
        for front_end in self.front_ends:
            self._add(front_end)
        for keeper in self._keepers:
            keeper.start()
        if config.fault_tolerance.enabled:
            self._limits = RecoveryLimits(config.fault_tolerance)
        self._is_configured.set_result(None)
        while waiting := [front_end.ready for front_end in self.front_ends if not front_end.ready.done()]:
            await asyncio.wait(waiting, timeout=STOPPED_LOOK_SECONDS)  # another one may take the place of a front end
        clock.mark("engine and front ends")
        for front_end in self.front_ends:
            front_end.send(OPEN)
        self._is_open = True
        text = "ready: %s serves %s, %d front ends, after %s"
        description = self.front_ends[0].ready.result()
        logger.info(text, self._settings.url, description, len(self.front_ends), clock.summary())
        await self._wait_until_given_up()

    def _add(self, front_end: FrontEndProcess) -> None:
        for index, keeper in enumerate(self._keepers):  # all keepers give it the same number
            front_end.number = keeper.add(_Seat(front_end, index))

    async def _wait_until_given_up(self) -> None:
        """Wait until all replicas are given up.

        Raises:
            EngineDeadError: all are given up. It is the error of one of them.
        """
        results = await asyncio.gather(*(keeper.failed() for keeper in self._keepers), return_exceptions=True)
        for error in reversed(results):
            if error is not None:
                raise error

    async def _replace(self, index: int, interruptions: list[asyncio.Future[Any]]) -> bool:
        """Start another front end in place of one that has ended. Returns whether the server goes on. It also returns when one
        of `interruptions` is done; then the front end may not be replaced yet."""
        dead = self.front_ends[index]
        # another front end's start may fail because the engine dies meanwhile
        if not (dead.has_died or dead.is_replacement):
            return False
        await asyncio.wait([*interruptions, self._is_configured], return_when=asyncio.FIRST_COMPLETED)
        if any(each.done() for each in interruptions):
            return True
        if self._limits is None or not self._keepers:
            return False
        fault = self._faults.get(index)
        if fault is None or dead.ready.done():
            if self._limits.problem():
                return False
            self._limits.record()
            deadline = time.monotonic() + self._limits.config.engine_recovery_timeout_sec
            fault = self._faults[index] = _Fault(deadline)
        else:  # the one that took the place of a dead one has died, too, before it was ready
            fault.num_failed += 1
        while True:
            if fault.num_failed:
                if time.monotonic() > fault.deadline:
                    return False
                pause = pause_seconds(fault.num_failed)
                await asyncio.wait(interruptions, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if any(each.done() for each in interruptions):
                    return True
            try:
                front_end = self._start_front_end(index, is_replacement=True)
                break
            except OSError as error:  # for example, there is no memory at this moment
                logger.error("front end %d cannot be started: %s", index, error)
                fault.num_failed += 1
        logger.error("front end %d has died (%s); another one is started", index, dead.process.state)
        self.front_ends[index] = front_end
        dead.close()
        for keeper in self._keepers:
            keeper.remove(dead.number)
        self._add(front_end)
        opening = asyncio.create_task(self._open(front_end))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return True

    async def _open(self, front_end: FrontEndProcess) -> None:
        news: list[asyncio.Future[Any]] = [front_end.ready, front_end.ended]
        await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        if front_end.ready.done() and self._is_open:  # otherwise `_run_engine` opens all of them
            logger.info("front end %d is ready again", front_end.index)
            front_end.send(OPEN)

    def _start_front_end(self, index: int, *, is_replacement: bool = False) -> FrontEndProcess:
        start = FrontEndStart(settings=self._settings, args=self._args, index=index, is_replacement=is_replacement)
        return FrontEndProcess(index, self._listener.socket, start, {"PROMETHEUS_MULTIPROC_DIR": self._folder})

    def _pass_hangup_on(self) -> None:
        for front_end in self.front_ends:
            front_end.process.send_signal(signal.SIGHUP)
