"""`RayExecutor`: Ray chooses the machines of the ranks and starts their processes. All else is as in `MultiprocExecutor`.

The ranks connect to the executor by TCP, each with a token that is valid once. Another process talks to Ray: ray_placement.py,
here called the placement process. If the placement process ends, or if Ray's head is gone, the ranks go on. A rank is lost when
its stream has ended, even if Ray still counts it as alive. Then the executor asks the placement process for a new process of
this rank. If the placement process has ended, the executor first starts another one.
"""

import importlib.util
import logging
import secrets
import signal
import sys
from dataclasses import replace

from inflight.config.engine import EngineConfig
from inflight.config.ranks import places_on
from inflight.errors import ConfigError
from inflight.executor.join import RankAcceptor
from inflight.executor.multiproc import WORKER_CLASS, MultiprocExecutor
from inflight.executor.rank_process import WorkerProcess, worker_title
from inflight.interface.codec import Message, encode
from inflight.interface.start_up import PlaceRanks, RanksPlaced, Refused, StartRank, StartUpFailed
from inflight.interface.worker import TOKEN_BYTES
from inflight.processes.child_process import SIGKILL_SECONDS, ChildProcess, wait_for_end
from inflight.processes.streams import IoStream, with_stream

logger = logging.getLogger(__name__)

TITLE = "inflight: ray"
MODULE = "inflight.executor.ray_placement"
QUIET = {"RAY_SCHEDULER_EVENTS": "0"}  # Ray prints no hints about its autoscaler
MAX_PLACEMENT_SECONDS = 15.0  # how long to wait for room
MAX_ANSWER_SECONDS = 25.0  # the same, with the time that Ray takes to start


class RayExecutor(MultiprocExecutor):
    """
    Raises:
        ConfigError: Ray is not installed or not running, or there is no room for the ranks.
        InflightError: a rank could not start.
    """

    def __init__(self, config: EngineConfig, worker_class: str = WORKER_CLASS) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "distributed_executor_backend='ray' needs Ray, which is not installed: pip install 'inflight-llm[ray]'"
            )
        if config.fault_tolerance.spare_workers:
            raise ConfigError(
                f"spare_workers={config.fault_tolerance.spare_workers} with distributed_executor_backend='ray': Ray starts a "
                "process when it is needed; leave spare_workers out"
            )
        # all of these are changed in the I/O thread only:
        self._ray: tuple[ChildProcess, IoStream] | None = None  # the placement process and its stream
        self._placed: RanksPlaced | None = None  # the last answer of the placement process; None if there is none
        self._unplaced: set[int] = set()  # ranks that wait for this answer, and are started then
        self._local_name = ""  # of the Unix socket to which ranks of this machine connect, which is faster than TCP
        self._machines: dict[str, int] = {}  # Ray's name of a machine -> its number
        self._surroundings = _surroundings()
        super().__init__(config, worker_class)

    def _prepare(self) -> None:
        """There are no spare processes."""

    def _launch_ranks(self) -> None:
        for rank in range(self.world_size):
            self._start_anew(rank)
        self._start_watching()

    def _watch(self) -> None:
        if self._ray is not None:
            self._ray[0].kill_if_stopped()
        super()._watch()

    # -- Ray, in the I/O thread ------------------------------------------------------------------------------------

    def _start_anew(self, rank: int) -> None:
        self._unplaced.add(rank)
        if self._placed is not None:
            self._start_placed(self._placed)
        elif self._ray is None:
            try:
                self._ray = self._start_ray()
            except OSError as error:  # for example, there is no memory at this moment; `recover` tries again
                self._could_not_start(rank, error)

    def _start_ray(self) -> tuple[ChildProcess, IoStream]:
        process, stream = with_stream(self._io, lambda fd: ChildProcess(TITLE, MODULE, [fd], variables=QUIET))
        stream.on_message = self._take_news
        stream.on_end = self._ray_ended
        device = self.config.device
        (cluster, group) = self._surroundings
        wanted = PlaceRanks(
            num_ranks=self.world_size,
            num_cpus=device.num_threads,
            num_gpus=int(device.kind != "cpu"),
            cluster=cluster,
            group=group,
            max_seconds=MAX_PLACEMENT_SECONDS,
        )
        stream.send(encode(wanted).buffers())
        self._io.loop.call_later(MAX_ANSWER_SECONDS, self._expect_answer, stream)
        return process, stream

    def _expect_answer(self, stream: IoStream) -> None:
        if self._ray is not None and self._ray[1] is stream and self._placed is None:
            self._not_placed(
                f"Ray has not answered within {MAX_ANSWER_SECONDS:g} s; check that its head runs, and that RAY_ADDRESS is the "
                "address of the head"
            )

    def _not_placed(self, reason: str) -> None:
        """The ranks that wait cannot take part. At the start, this ends it; `recover` tries again."""
        for rank in self._missing:
            self.meeting.fail(rank, ConfigError(reason))
        self._end_ray()

    def _take_news(self, message: Message) -> None:
        match message:
            case RanksPlaced():
                self._placed = message
                self._start_placed(message)
            case StartUpFailed():
                self._deliver(replace(message, epoch=self.meeting.epoch))
            case _:
                assert isinstance(message, Refused), message
                self._not_placed(message.reason)

    def _start_placed(self, placed: RanksPlaced) -> None:
        """Start the ranks that wait for `placed`. Correct `places` for them, and for lost ranks, whose machine may change."""
        if self._acceptor is None:
            name = f"inflight-{secrets.token_hex(8)}"
            unknown = secrets.token_hex(TOKEN_BYTES)
            self._acceptor = self._new_acceptor((placed.host, 0), unknown, name)
            self._local_name = name
            self._acceptor.start()
        for name in (placed.machine, *placed.machines):
            self._machines.setdefault(name, len(self._machines))
        machines = [self._machines[name] for name in placed.machines]
        places = list(self.places)
        starting = self._missing
        for rank in sorted(starting):
            settled = (place for place in places if place.rank not in starting and place.machine == machines[rank])
            free = set(range(len(places))) - {place.local_rank for place in settled}
            # Ray shows each process its own GPU only
            places[rank] = replace(places_on(machines)[rank], local_rank=min(free), device_index=0)
            starting.remove(rank)
        self.places = tuple(places)
        while self._unplaced:
            self._start_rank(self._unplaced.pop(), self._acceptor)

    def _start_rank(self, rank: int, acceptor: RankAcceptor) -> None:
        assert self._ray is not None
        token = secrets.token_hex(TOKEN_BYTES)
        acceptor.expect(rank, token)
        host, port = acceptor.address
        command = StartRank(
            rank=rank,
            world_size=self.world_size,
            title=worker_title(self.config.parallel.layout, rank),
            local_name=self._local_name,
            host=host,
            port=port,
            token=token,
        )
        self._ray[1].send(encode(command).buffers())

    def _ray_ended(self, reason: str) -> None:
        logger.warning("the process that talks to Ray has ended (%s); the ranks that have started go on", reason)
        self._end_ray()
        for rank in self._missing:
            self._could_not_start(rank, "the process that talks to Ray has ended; see its output")

    @property
    def _missing(self) -> set[int]:
        """The ranks that are not started, or have not connected."""
        return self._unplaced | (set() if self._acceptor is None else self._acceptor.missing)

    def _end_ray(self) -> None:
        """End the placement process. Then Ray ends the actors, too, but the ranks go on."""
        if self._ray is not None:
            process, stream = self._ray
            self._ray = self._placed = None
            stream.close()
            process.send_signal(signal.SIGKILL)
            wait_for_end([process], SIGKILL_SECONDS)
            process.close()

    def _host(self, rank: int) -> str:
        assert self._acceptor is not None
        return self._acceptor.address[0] if rank in self.local_ranks else ""

    # -- replacement and end ---------------------------------------------------------------------------------------

    def _give_up(self, rank: int) -> WorkerProcess | None:
        self._expect_again(rank)
        return None

    def _terminate(self) -> None:
        super()._terminate()
        self._end_ray()


def _surroundings() -> tuple[str, str]:
    """Returns the cluster and the placement group of this process, as in `PlaceRanks`."""
    if "ray" not in sys.modules:
        return "", ""
    from inflight.executor.ray_placement import surroundings  # not at the top, because it needs Ray

    return surroundings()
