"""`EngineProcess`: one process of the engine core, seen by the process that started it.

The two share a *control socket*. After the `StartEngine` frame it is a `LineWire`:

    owner -> core   {"front_end": number, "num_deaths": n}, which brings one end of a front end's socket; {"ping": true};
                    once: {"begin": fields of a `FaultStatus`, the recoveries so far; "fault_time", "guilty",
                    "recovery_times": see `begin`}
    core -> owner   {"pong": true}, {"ready": blocks of the KV cache},
                    {"faults": fields of a `FaultStatus`, "recovery_times": [time, ...]},
                    {"failed": why the engine could not start},
                    {"unconnected": number of a front end, whose socket did not arrive, as there was no free descriptor},
                    {"lone_request": id of the sequence that runs alone, see `Quarantine`; "" if all may run}

When the owner closes the control socket, the core ends.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.errors import EngineDeadError
from inflight.interface.serving import StartEngine
from inflight.interface.statistics import FaultStatus
from inflight.processes.child_process import ChildProcess, stop_processes
from inflight.processes.line_wire import LineWire
from inflight.processes.ping_watch import PingWatch
from inflight.processes.streams import BlockingStream
from inflight.sockets import socket_pair

logger = logging.getLogger(__name__)

TITLE = "inflight: engine"
SPARE_TITLE = "inflight: spare engine"
MAX_END_SECONDS = 20.0  # how long the process may need to end (its workers: 5 s; a step that hangs: 15 s)
SOCKET_BUFFER_BYTES = 2**20
EXIT_GIVEN_UP = 4  # exit code of an engine core whose ranks needed too many recoveries
# exit code of an engine core that needs another machine with its front ends, or other replicas, which do not answer
EXIT_HEAD_LOST = 5


def title_of(config: EngineConfig, title: str = TITLE) -> str:
    """The title of the process. If this machine has several replicas, it has the replica's number."""
    parallel = config.parallel
    if len(parallel.replicas) == 1:
        return title
    return f"{title} {parallel.replicas[parallel.replica_index]}"


class EngineProcess:
    """The process in which the engine core runs. It loads the model after `begin`. Used on one event loop.

    Attributes:
        process: the process itself.
        sockets: number of a front end -> the socket to the engine, one for each front end given to `begin`. A caller that takes
            one out owns it. `close` closes the others.
        is_ready: whether the engine has started.
        num_blocks: the blocks of a rank's KV cache; 0 before the engine has started.
        failure: why the engine could not start; "" if nothing is known.
        has_ended: whether the process has ended.
        was_killed: whether this object has killed the process, because it hung or took too long.
        faults: the newest status that the core has sent; None before the first one.
        recovery_times: when its ranks, and those of earlier processes, recovered (`RecoveryLimits.times`).
        lone_request: the id of the sequence that runs alone; "" if all may run.
    """

    def __init__(self, args: EngineArgs, config: EngineConfig, *, is_spare: bool = False) -> None:
        """
        Args:
            is_spare: see `StartEngine`.

        Raises:
            EngineDeadError: the process ended at once.
        """
        self.sockets: dict[int, socket.socket] = {}
        self.is_ready = self.has_ended = self.was_killed = False
        self.num_blocks = 0
        self.failure = ""
        self.recovery_times: tuple[float, ...] = ()
        self._unconnected: list[int] = []
        self.faults: FaultStatus | None = None
        self.lone_request = ""
        self._pings = PingWatch(self._ping, lambda _, reason: self.kill(reason))
        self._has_news = asyncio.Event()
        self._is_released = False
        self._lock = threading.Lock()
        with socket_pair() as (self._control, theirs):
            title = title_of(config, SPARE_TITLE if is_spare else TITLE)
            self.process = ChildProcess(
                title, "inflight.engine.process.core_process", [theirs.fileno()], keeps_secrets=True
            )
        start = StartEngine(
            config=config, tokenizer=args.tokenizer, skip_tokenizer_init=args.skip_tokenizer_init, is_spare=is_spare
        )
        try:
            BlockingStream(self._control).send(start)
        except OSError as error:
            raise self._gone() from error
        self._control.setblocking(False)
        self._wire = LineWire(self._control)
        self._loop = asyncio.get_running_loop()
        self._is_watched = True  # whether the loop knows the descriptors
        self._loop.add_reader(self._control, self._read)
        self._loop.add_reader(self.process.pidfd, self._record_end)

    def begin(
        self,
        front_ends: Sequence[int] = (0,),
        past: FaultStatus | None = None,
        fault_time: float = 0.0,
        guilty: Sequence[str] = (),
        recovery_times: Sequence[float] = (),
    ) -> None:
        """Let the process load the model and serve. Call it once.

        Args:
            past: the recoveries before this process. None: there was none.
            fault_time: when the process before this one was lost, as a time of `time.monotonic()`; 0.0 if there was none.
            guilty: ids of sequences that ran alone when earlier processes were lost. If a front end sends one again, it fails.
            recovery_times: when the ranks of earlier processes recovered, as times of `time.monotonic()`. They count, too.

        Raises:
            EngineDeadError: the process is gone, or this process has no free descriptors. The process was ended.
        """
        try:
            for number in front_ends:
                self.sockets[number] = self._pass_socket(number, 0)
            begin = {
                "begin": asdict(past or FaultStatus()),
                "fault_time": fault_time,
                "guilty": list(guilty),
                "recovery_times": list(recovery_times),
            }
            self._wire.send(begin)
        except OSError as error:
            self.unwatch()
            raise self._gone() from error

    def _gone(self) -> EngineDeadError:
        """End the process, and close all descriptors. Returns the error that says so."""
        self._shut_down_sockets()
        stop_processes([self.process], MAX_END_SECONDS)
        self._release()
        return EngineDeadError(f"the engine's process is gone: {self.process.state}")

    def _remove_readers(self) -> None:
        self._loop.remove_reader(self._control)
        self._loop.remove_reader(self.process.pidfd)

    def connect(self, number: int, num_deaths: int) -> socket.socket | None:
        """Connect a front end to the running engine. Returns its socket, or None if the process is gone.

        Args:
            num_deaths: how many front ends have died so far.
        """
        try:
            return self._pass_socket(number, num_deaths)
        except OSError:
            return None

    def check(self) -> None:
        """Kill the process if it hangs, otherwise ping it. It answers even while a step runs. Call this every PING_SECONDS."""
        self._pings.tick(0, self.process)

    def _ping(self, _: int) -> None:
        with contextlib.suppress(OSError):  # the socket's buffer is full, or the process has ended
            self._wire.send({"ping": True})

    def kill(self, reason: str) -> None:
        """Kill the process, and log the reason."""
        logger.error("the engine's process is killed: %s", reason)
        self.was_killed = True
        self.process.send_signal(signal.SIGKILL)

    @property
    def state(self) -> str:
        """Says whether the process runs, or how it ended, and why, if it has told the reason."""
        if self.failure:
            return f"{self.process.state}: {self.failure}"
        return self.process.state

    @property
    def was_lost(self) -> bool:
        """Whether something else has killed the process: the kernel, for lack of memory, or an operator."""
        code = self.process.exit_code
        return code is not None and code < 0 and not self.was_killed

    def take_unconnected(self) -> list[int]:
        """Returns the front ends that must be connected again."""
        taken, self._unconnected = self._unconnected, []
        return taken

    async def wait_for_news(self, seconds: float) -> None:
        """Wait until the process has become ready or has ended, but at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_news.wait()
        self._has_news.clear()

    async def close(self, grace_seconds: float = MAX_END_SECONDS) -> None:
        """Shut down the sockets, wait until the process of the engine has ended, and kill it if it does not end in time. Then
        close the owner's ends of the sockets. Call it once."""
        self.unwatch()
        self._shut_down_sockets()
        await asyncio.to_thread(stop_processes, [self.process], grace_seconds)
        self._release()

    def unwatch(self) -> None:
        """Let the event loop call this object no more."""
        self._remove_readers()
        self._is_watched = False

    def abandon(self) -> None:
        """End the process, in any thread, because the event loop has ended or does not run. If it may run again and knows the
        descriptors (`unwatch`), they stay open until `close` is called there."""
        self._shut_down_sockets()
        stop_processes([self.process], MAX_END_SECONDS)
        if self._loop.is_closed() or not self._is_watched:
            self._release()

    def _release(self) -> None:
        """Close all descriptors. Idempotent, because `close` and `abandon` may run at the same time."""
        with self._lock:
            is_first, self._is_released = not self._is_released, True
        if is_first:
            self._shut_down_sockets()
            for ours in (self._control, *self.sockets.values()):
                ours.close()
            self.process.close()

    def _shut_down_sockets(self) -> None:
        for ours in (self._control, *self.sockets.values()):
            with contextlib.suppress(OSError):  # the other end is gone
                ours.shutdown(socket.SHUT_RDWR)  # a process that was forked from this one may keep a copy open

    def _pass_socket(self, number: int, num_deaths: int) -> socket.socket:
        with socket_pair() as (ours, theirs):
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            self._wire.send({"front_end": number, "num_deaths": num_deaths}, [theirs.fileno()])
        return ours

    def _record_end(self) -> None:
        self._loop.remove_reader(self.process.pidfd)
        self._read()  # perhaps it became ready before its end
        self.has_ended = True
        self._has_news.set()

    def _read(self) -> None:
        try:
            arrived = self._wire.receive()
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._loop.remove_reader(self._control)
            return
        for message, _ in arrived:
            match message:
                case {"pong": _}:
                    self._pings.heard(0)
                case {"failed": str(reason)}:
                    self.failure = reason
                case {"ready": int(num_blocks)}:
                    self.is_ready = True
                    self.num_blocks = num_blocks
                    self._has_news.set()
                case {"lone_request": str(request_id)}:
                    self.lone_request = request_id
                case {"faults": fields, "recovery_times": times}:
                    self.faults = FaultStatus(**fields)
                    self.recovery_times = tuple(times)
                case {"unconnected": int(number)}:
                    self._unconnected.append(number)
