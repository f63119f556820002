"""`MultiprocExecutor`: every rank is a process, on this machine or another one, connected to the executor by one byte stream.

    caller ── _send ── encode ── IoStream ══ socket ══ inbox thread ── main thread (WorkerLoop)
    _deliver ◀── decode ── I/O thread ══ socket ═════════════════════════════╯

Node 0 is the engine's machine. It listens for connections if there are other nodes, starts its own processes, and waits for all
ranks. When a thread ends, the kernel ends the processes it started. So the I/O thread starts them, because it lives as long as
the executor. A rank is dead when its stream or its process has ended. Messages that it sent before its death are delivered
first. A rank that does not answer pings is lost too: ping_watch.py.

A lost rank is replaced in the next epoch (recovery.py). On this machine a spare process takes its place, or a new process. On
another node, `inflight worker` makes a new connection and starts a new process with it, as at the start. In a spare engine core
(engine_keeper.py) all ranks of this machine begin as spare processes.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections import deque
from functools import partial

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.errors import CodecError, EngineError, RankError, StepTimeoutError, WorkerDiedError
from inflight.executor.executor import Executor
from inflight.executor.failures import failed_reply
from inflight.executor.join import RankAcceptor
from inflight.executor.rank_process import SPARE_TITLE, WAITING_TITLE, WorkerProcess, worker_title
from inflight.executor.recovery import recover
from inflight.interface.codec import Message, encode
from inflight.interface.framing import Buffer
from inflight.interface.messages import (
    AskActivity,
    ExecuteModel,
    RpcCall,
    RpcReply,
    StepReply,
    WorkerActivity,
    WorkerCommand,
    WorkerFailure,
)
from inflight.interface.start_up import (
    BeginEpoch,
    EpochCommand,
    Listening,
    Preload,
    Ready,
    StartUp,
    StartUpFailed,
    Stop,
)
from inflight.interface.worker import TOKEN_BYTES, Rendezvous
from inflight.processes.child_process import SIGKILL_SECONDS, stop_processes, wait_for_end
from inflight.processes.io_thread import IoThread
from inflight.processes.ping_watch import PING_SECONDS, PingWatch
from inflight.processes.streams import MAX_LINK_SILENCE_SECONDS, REPLACED_LINK_SILENCE_SECONDS, IoStream, with_stream

logger = logging.getLogger(__name__)

WORKER_CLASS = "inflight.worker.worker:Worker"
EXPERT_WORKER_CLASS = "inflight.worker.expert_worker:ExpertWorker"  # of replicas that divide experts
MAX_JOIN_SECONDS = 300.0
SPARE_SECONDS = 2.0  # a new spare is started this long after one was taken, so that it does not slow the recovery down
EXIT_CODE_SECONDS = 1.0  # how long a process whose stream has ended may live on; its exit code is the better reason


class MultiprocExecutor(Executor):
    """
    Args:
        worker_class: "module:class" of the worker. The processes of the ranks import it.
        max_join_seconds: how long to wait until the ranks of other nodes connect.

    Raises:
        InflightError: a rank could not start. The error contains the rank's traceback.
    """

    def __init__(
        self, config: EngineConfig, worker_class: str = WORKER_CLASS, *, max_join_seconds: float = MAX_JOIN_SECONDS
    ) -> None:
        super().__init__(config)
        is_usual = worker_class == WORKER_CLASS
        self._worker_class = EXPERT_WORKER_CLASS if is_usual and config.parallel.is_in_lockstep else worker_class
        self._max_join_seconds = max_join_seconds
        self._io = IoThread("inflight-io")
        self._acceptor: RankAcceptor | None = None
        self._terminating = self._is_watching = False
        self._ranks = [_Rank() for _ in range(self.world_size)]
        self._spares: deque[tuple[WorkerProcess, IoStream]] = deque()  # changed in the I/O thread, until `_terminate`
        self._spares_lock = threading.Lock()  # so that a spare that ends during `_terminate` is closed only once
        self._wanted_spares = 0, SPARE_TITLE  # how many there shall be, and their title
        self._pings = PingWatch(self._ask, self._hangs)
        # the last command and its encoded bytes, so that a step is encoded only once for all ranks
        self._encoded: tuple[WorkerCommand | EpochCommand | None, list[Buffer]] = (None, [])
        self._io.start()
        self._start()

    # -- start-up --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._wanted_spares = len(self.local_ranks), WAITING_TITLE
        self._io.run(self._fill_spares)
        self._io.run(self._start_watching)

    def _launch(self) -> None:
        parallel = self.config.parallel
        fault_tolerance = self.config.fault_tolerance
        if parallel.nnodes > 1:
            self._acceptor = self._new_acceptor((parallel.master_addr, parallel.master_port), envs.cluster_token())
        self._wanted_spares = 0, SPARE_TITLE
        self.starting.update(range(self.world_size))
        self._io.run(self._launch_ranks)
        try:
            self.join_epoch()
        except StepTimeoutError as error:  # a process hung while it started; another one may start
            if parallel.nnodes > 1:  # ranks of other machines may not have connected yet
                raise
            recover(self, error)
        if fault_tolerance.enabled:
            self._wanted_spares = fault_tolerance.spare_workers, SPARE_TITLE
            self._io.run(self._fill_spares)
        elif self._acceptor is not None:
            self._io.run(self._acceptor.close)

    def _new_acceptor(self, address: tuple[str, int], token: str, local_name: str = "") -> RankAcceptor:
        silence = REPLACED_LINK_SILENCE_SECONDS if self.config.fault_tolerance.enabled else MAX_LINK_SILENCE_SECONDS
        max_silence = min(silence, self._step_budget)
        return RankAcceptor(self._io, address, local_name, self.config.parallel, token, max_silence, self._begin)

    def _launch_ranks(self) -> None:
        """Start the processes of this machine, and listen for those of other machines."""
        if self._acceptor is not None:
            self._acceptor.start()
            for rank in set(range(self.world_size)) - set(self.local_ranks):
                self._acceptor.expect(rank)
            self._io.loop.call_later(self._max_join_seconds, self._give_up_waiting)
        for rank in self.local_ranks:
            self._start_process(rank)
        self._start_watching()

    def _start_process(self, rank: int) -> None:
        """Start a process for a rank of this machine, or take a spare one."""
        while self._spares:
            process, stream = self._spares.popleft()
            self._io.loop.remove_reader(process)
            if process.is_alive and not process.is_stopped:
                break
            process.send_signal(signal.SIGKILL)
            wait_for_end([process], SIGKILL_SECONDS)
            stream.close()
            process.close()
        else:
            process, stream = self._new_process(worker_title(self.config.parallel.layout, rank))
        self._ranks[rank].process = process
        self._io.loop.add_reader(process, partial(self._process_ended, rank, self._ranks[rank]))
        self._begin(rank, stream)

    def _new_process(self, title: str) -> tuple[WorkerProcess, IoStream]:
        is_one_node = self.config.parallel.nnodes == 1
        return with_stream(self._io, lambda fd: WorkerProcess(title, fd, is_one_node=is_one_node))

    def _begin(self, rank: int, stream: IoStream) -> None:
        """Called when the stream to a rank is open. Sends the rank what it needs to construct its worker."""
        state = self._ranks[rank]
        parallel = self.config.parallel
        stream.on_message = partial(self._receive, rank, state)
        stream.on_end = partial(self._stream_ended, rank, state)
        state.stream = stream
        start_up = StartUp(
            config=self.config,
            place=self.places[rank],
            title=worker_title(parallel.layout, rank),
            worker_class=self._worker_class,
            epoch=self.meeting.epoch,
            host=self._host(rank),
        )
        stream.send(encode(start_up).buffers())

    def _host(self, rank: int) -> str:
        """Returns the address at which the rank listens for other ranks, as in `StartUp`."""
        if rank not in self.local_ranks:
            return ""
        if self.config.parallel.nnodes > 1:
            return self.config.parallel.master_addr
        return "127.0.0.1"

    def _rendezvous(self, addresses: tuple[tuple[str, int], ...]) -> Rendezvous | None:
        if self.world_size == 1:
            return None
        return Rendezvous(
            epoch=self.meeting.epoch,
            timeout_seconds=self._step_budget,
            token=secrets.token_bytes(TOKEN_BYTES),
            addresses=addresses,
        )

    def _give_up_waiting(self) -> None:
        if self._acceptor is None or self.meeting.epoch > 0:
            return
        if missing := sorted(self._acceptor.missing):
            parallel = self.config.parallel
            self.meeting.close(
                EngineError(
                    f"ranks {', '.join(map(str, missing))} did not connect to {parallel.master_addr}:"
                    f"{parallel.master_port} within {self._max_join_seconds:g} s; start `inflight worker` on every one of "
                    f"the {parallel.nnodes} nodes except node 0"
                )
            )

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, rank: int, command: WorkerCommand | EpochCommand) -> None:
        stream = self._ranks[rank].stream
        if stream is None:
            return  # a rank of another node that has not connected yet gets `StartUp` when it connects
        try:
            if command is not self._encoded[0]:
                self._encoded = command, encode(command).buffers()
        except CodecError as error:
            if not isinstance(command, ExecuteModel | RpcCall):
                raise  # other commands can always be encoded, so this is a defect of the caller
            failure = WorkerFailure(type_name="CodecError", message=str(error), traceback="")
            reply = failed_reply(command, rank, failure)
            self._io.call_soon(lambda: self._deliver(reply))  # later, because this thread holds the executor's lock
            return
        stream.send(self._encoded[1])

    def _receive(self, rank: int, state: _Rank, message: Message) -> None:
        if state is not self._ranks[rank]:
            return  # the rank was replaced
        self._pings.heard(rank)
        match message:
            case StepReply() | RpcReply() | WorkerActivity() if message.rank == rank:
                self._deliver(message)
            case Ready() if message.rank == rank and message.epoch > state.ready_epoch:
                state.ready_epoch = message.epoch
                self._deliver(message)
            case Listening() if message.rank == rank:
                self._deliver(message)
            case StartUpFailed() if message.rank == rank:
                # such a process ends by itself; after an echo it stays, for the next epoch
                ends = not state.is_ready and not message.failure.is_echo and message.epoch == self.meeting.epoch
                state.is_gone = state.is_gone or ends
                self._deliver(message)
            case _:
                self._lose(rank, state, f"it sent a message of type {type(message).__name__}, which is not allowed now")

    def _ask(self, rank: int) -> None:
        stream = self._ranks[rank].stream
        if stream is not None:
            stream.send(encode(AskActivity()).buffers())

    def _state(self, rank: int) -> str:
        process = self._ranks[rank].process
        return process.state if process is not None else ""

    # -- pings and spare processes, in the I/O thread --------------------------------------------------------------

    def _start_watching(self) -> None:
        """Look after all processes from their start on. Idempotent."""
        if self.config.fault_tolerance.enabled and not self._is_watching:
            self._is_watching = True
            self._watch()

    def _watch(self) -> None:
        if self._terminating:
            return
        for rank, state in enumerate(self._ranks):
            # a starting process of another node is not pinged: nothing shows whether it is silent because it imports libraries
            if (state.is_ready or state.process is not None) and not state.is_gone:
                self._pings.tick(rank, state.process)
        for process, _ in self._spares:  # it answers no pings; its end is noticed by `_spare_ended`
            process.kill_if_stopped()
        self._io.loop.call_later(PING_SECONDS, self._watch)

    def _hangs(self, rank: int, reason: str) -> None:
        self._lose(rank, self._ranks[rank], reason, StepTimeoutError)

    @property
    def num_spares(self) -> int:
        return len(self._spares)

    def _fill_spares(self) -> None:
        """Start spare processes, as many as are missing."""
        count, title = self._wanted_spares
        while len(self._spares) < count and not self._terminating:
            try:
                spare = self._new_process(title)
            except OSError as error:  # for example, there is no memory or no descriptor at this moment
                logger.warning(
                    "a spare process could not be started (%s); the next try is in %g s", error, SPARE_SECONDS
                )
                self._io.loop.call_later(SPARE_SECONDS, self._fill_spares)
                return
            process, stream = spare
            stream.on_message = lambda message: None
            stream.on_end = lambda reason: None  # the end of the process is noticed below
            stream.send(encode(Preload(worker_class=self._worker_class)).buffers())
            self._spares.append(spare)
            self._io.loop.add_reader(process, partial(self._spare_ended, spare))

    def _spare_ended(self, spare: tuple[WorkerProcess, IoStream]) -> None:
        process, stream = spare
        self._io.loop.remove_reader(process)
        with self._spares_lock:
            if self._terminating:  # `_terminate` closes it
                return
            self._spares.remove(spare)
        stream.close()
        logger.warning("a spare process has ended (%s); a new one is started", process.state)
        self._io.loop.call_later(SPARE_SECONDS, self._fill_spares)
        process.close()

    # -- deaths, in the I/O thread -------------------------------------------------------------------------------

    def _process_ended(self, rank: int, state: _Rank) -> None:
        assert state.process is not None
        self._io.loop.remove_reader(state.process)
        if state.stream is not None:
            state.stream.on_end = lambda reason: None  # the reason below, `process.state`, is more exact
            state.stream.drain()
        self._lose(rank, state, state.process.state)

    def _stream_ended(self, rank: int, state: _Rank, reason: str) -> None:
        """Wait a moment for the exit code of the process, which is a better reason. A dying process closes its stream first."""
        if state.process is None or reason.startswith("it sent"):
            self._lose(rank, state, reason)
        else:
            self._io.loop.call_later(EXIT_CODE_SECONDS, partial(self._lose, rank, state, reason))

    def _lose(self, rank: int, state: _Rank, reason: str, kind: type[RankError] = WorkerDiedError) -> None:
        """Mark a rank as lost, because it is gone or can no longer be trusted. Idempotent."""
        if state.is_gone:
            return
        state.is_gone = True
        state.has_ended.set()
        if state.stream is not None:
            state.stream.abort()
        if state.process is not None and not self._terminating:
            state.process.send_signal(signal.SIGKILL)
        if state is not self._ranks[rank]:
            return
        if state.process is None:
            self._expect_again(rank)
        if state.is_ready:
            self._rank_died(rank, reason, kind)
        else:
            self._could_not_start(rank, f"{reason}; see the output of its process", kind)

    def _could_not_start(self, rank: int, reason: object, kind: type[RankError] = WorkerDiedError) -> None:
        self.meeting.fail(rank, kind(f"rank {rank} could not start: {reason}", rank=rank))

    def _discard(self, rank: int) -> None:
        process = self._io.run(partial(self._give_up, rank))
        if process is not None:
            process.send_signal(signal.SIGKILL)
            wait_for_end([process], SIGKILL_SECONDS)  # then its memory is free, also that of a GPU
            process.close()

    def _give_up(self, rank: int) -> WorkerProcess | None:
        old = self._ranks[rank]
        if old.process is not None:
            self._io.loop.remove_reader(old.process)
            self._forget(rank)
        elif old.is_ready:
            self._expect_again(rank)
        return old.process

    def _start_again(self, rank: int) -> None:
        self._io.run(partial(self._start_anew, rank))

    def _start_anew(self, rank: int) -> None:
        stream = self._ranks[rank].stream
        if rank in self.local_ranks:
            try:
                self._start_process(rank)
            except OSError as error:  # for example, there is no memory at this moment; `recover` tries again
                self._could_not_start(rank, error)
            self._io.loop.call_later(SPARE_SECONDS, self._fill_spares)
        elif stream is not None:  # a new process on the other node has connected already, perhaps in an older epoch
            stream.send(encode(BeginEpoch(epoch=self.meeting.epoch)).buffers())

    def _expect_again(self, rank: int) -> None:
        """Accept a new process for a rank of another node. `inflight worker` starts it there."""
        self._forget(rank)
        if self._acceptor is not None:
            self._acceptor.expect(rank)

    def _forget(self, rank: int) -> None:
        """Forget the process of a rank, and ignore its messages from now on."""
        old, self._ranks[rank] = self._ranks[rank], _Rank()
        old.is_gone = True
        if old.stream is not None:
            old.stream.abort()
        self._pings.heard(rank)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        with self._spares_lock:
            self._terminating = True
        end = self._shutdown_deadline(is_broken=any(state.is_gone for state in self._ranks))
        stop = encode(Stop()).buffers()
        for state in self._ranks:
            if state.stream is not None and (state.is_ready or state.process is None):
                state.stream.send(stop)
            elif state.process is not None:  # it is still loading, so nothing is lost if it is killed
                state.process.send_signal(signal.SIGKILL)
        processes = [state.process for state in self._ranks if state.process is not None]
        for process, _ in self._spares:
            process.send_signal(signal.SIGKILL)
        processes += [process for process, _ in self._spares]
        stop_processes(processes, max(end - time.monotonic(), 0.0))
        if not self._io.is_current:  # if this is the I/O thread, do not wait: nobody else reads the streams
            for state in self._ranks:
                if state.is_ready and state.process is None:
                    state.has_ended.wait(max(end - time.monotonic(), 0.0))
        self._io.stop()
        if self._acceptor is not None:
            self._acceptor.close()
        for stream in (*(state.stream for state in self._ranks), *(stream for _, stream in self._spares)):
            if stream is not None:
                stream.close()
        for process in processes:
            process.close()


class _Rank:
    """What the executor knows about one process of a rank. Written in the I/O thread."""

    def __init__(self) -> None:
        self.stream: IoStream | None = None
        self.process: WorkerProcess | None = None  # None if the rank is on another node
        self.ready_epoch = -1  # the last epoch that the rank has joined
        self.is_gone = False
        self.has_ended = threading.Event()  # set when the stream has ended

    @property
    def is_ready(self) -> bool:
        """Whether the rank has joined an epoch, so its model is loaded."""
        return self.ready_epoch >= 0
