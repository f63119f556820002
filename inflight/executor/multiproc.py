"""`MultiprocExecutor`: every rank is a process, on this machine or another one, connected to the executor by one byte stream.

    caller ── _send ── encode ── Stream ══ socket ══ inbox thread ── main thread (WorkerLoop)
    _deliver ◀── decode ── I/O thread ══ socket ═══════════════════════════╯

Node 0 is the engine's machine. At a start it listens for connections if there are other nodes, starts its own processes, and
waits for all ranks. When a thread ends, the kernel ends the processes it started. So the I/O thread starts them, because it
lives as long as the executor. A rank is dead when its stream or its process has ended. Messages that it sent before its death
are delivered first.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.config.ranks import RankLayout, ranks_of_node
from inflight.errors import CodecError, EngineError, WorkerDiedError
from inflight.executor.executor import Executor
from inflight.executor.failures import failed_reply, start_up_error
from inflight.executor.io_thread import IoThread
from inflight.executor.join import Listener
from inflight.executor.process import WorkerProcess, stop_processes, worker_title
from inflight.executor.transport import MAX_LINK_SILENCE_SECONDS, Stream
from inflight.interface.codec import Message, encode
from inflight.interface.framing import Buffer
from inflight.interface.messages import (
    AskActivity,
    ProvideGrammarOutput,
    RpcReply,
    StepReply,
    WorkerActivity,
    WorkerCommand,
    WorkerFailure,
)
from inflight.interface.start_up import Ready, StartUp, StartUpFailed, Stop
from inflight.interface.worker import TOKEN_BYTES, Rendezvous
from inflight.sockets import listen

logger = logging.getLogger(__name__)

WORKER_CLASS = "inflight.worker.worker:Worker"
MAX_JOIN_SECONDS = 300.0
EXIT_CODE_SECONDS = 0.05  # how long to wait for the exit code of a process after its stream has ended


class MultiprocExecutor(Executor):
    """
    Args:
        worker_class: "module:class" of the worker. The processes of the ranks import it.
        max_join_seconds: how long to wait until the ranks of other nodes connect.

    Raises:
        InflightError: a rank could not start. The error contains the rank's traceback.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker_class: str = WORKER_CLASS,
        *,
        max_join_seconds: float = MAX_JOIN_SECONDS,
    ) -> None:
        super().__init__(config)
        self._worker_class = worker_class
        self._max_join_seconds = max_join_seconds
        self._rendezvous: Rendezvous | None = None
        self._io = IoThread("inflight-io")
        self._listener: Listener | None = None
        self._terminating = False
        self._ranks = [_Rank() for _ in range(self.world_size)]
        # the last command and its encoded bytes, so that a step is encoded only once for all ranks
        self._encoded: tuple[WorkerCommand | None, list[Buffer]] = (None, [])
        self._start()

    # -- start-up --------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        parallel = self.config.parallel
        local_ranks = ranks_of_node(self.world_size, parallel.nnodes, 0)
        if parallel.nnodes > 1:
            max_silence_seconds = min(MAX_LINK_SILENCE_SECONDS, self._step_budget)
            self._listener = Listener(self._io, parallel, envs.cluster_token(), max_silence_seconds, self._begin)
        self._io.start()
        with contextlib.ExitStack() as until_launched:
            listen_fd = None
            if self.world_size > 1:
                host = parallel.master_addr if parallel.nnodes > 1 else "127.0.0.1"
                place = until_launched.enter_context(listen(host, 0))
                listen_fd = place.fileno()
                self._rendezvous = Rendezvous(
                    host=host,
                    port=int(place.getsockname()[1]),
                    epoch=self._table.epoch,
                    timeout_seconds=self._step_budget,
                    token=secrets.token_bytes(TOKEN_BYTES),
                )
            self._io.run(partial(self._launch_local, local_ranks, listen_fd))
        self._wait_until_started()
        if self._listener is not None:
            self._io.run(self._listener.close)

    def _launch_local(self, local_ranks: range, listen_fd: int | None) -> None:
        """Start the processes of this machine. The process of rank 0 inherits `listen_fd`, a socket that already listens and
        through which the ranks find each other."""
        if self._listener is not None:
            self._listener.start()
            self._io.loop.call_later(self._max_join_seconds, self._give_up_waiting)
        layout = RankLayout(self.config.parallel.tensor_parallel_size, self.config.parallel.pipeline_parallel_size)
        for rank in local_ranks:
            ours, theirs = socket.socketpair()
            inherited = listen_fd if rank == 0 else None
            with theirs:
                try:
                    process = WorkerProcess(
                        worker_title(layout, rank),
                        theirs.fileno(),
                        inherited,
                        is_one_node=self.config.parallel.nnodes == 1,
                    )
                except BaseException:
                    ours.close()
                    raise
            self._ranks[rank].process = process
            self._io.loop.add_reader(process, partial(self._process_ended, rank))
            self._begin(rank, Stream(self._io, ours), inherited)

    def _begin(self, rank: int, stream: Stream, listen_fd: int | None = None) -> None:
        """Called when the stream to a rank is open. Sends the rank what it needs to construct its worker."""
        stream.on_message = partial(self._receive, rank)
        stream.on_end = partial(self._stream_ended, rank)
        self._ranks[rank].stream = stream
        rendezvous = None if self._rendezvous is None else replace(self._rendezvous, listen_fd=listen_fd)
        start_up = StartUp(config=self.config, rank=rank, worker_class=self._worker_class, rendezvous=rendezvous)
        stream.send(encode(start_up).buffers())

    def _give_up_waiting(self) -> None:
        assert self._listener is not None
        if missing := sorted(self._listener.missing):
            parallel = self.config.parallel
            self._started.put(
                EngineError(
                    f"ranks {', '.join(map(str, missing))} did not connect to {parallel.master_addr}:"
                    f"{parallel.master_port} within {self._max_join_seconds:g} s; start `inflight worker` on every one of "
                    f"the {parallel.nnodes} nodes except node 0"
                )
            )

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, rank: int, command: WorkerCommand) -> None:
        stream = self._ranks[rank].stream
        assert stream is not None, "every rank has started"
        try:
            if command is not self._encoded[0]:
                self._encoded = command, encode(command).buffers()
        except CodecError as error:
            if isinstance(command, ProvideGrammarOutput):
                raise  # masks can always be encoded, so this is a defect of the caller
            failure = WorkerFailure(type_name="CodecError", message=str(error), traceback="")
            reply = failed_reply(command, rank, failure)
            self._io.call_soon(lambda: self._deliver(reply))  # later, because this thread holds the executor's lock
            return
        stream.send(self._encoded[1])

    def _receive(self, rank: int, message: Message) -> None:
        match message:
            case StepReply() | RpcReply() | WorkerActivity() if message.rank == rank:
                self._deliver(message)
            case Ready() if not self._ranks[rank].is_ready:
                self._ranks[rank].is_ready = True
                self._started.put(None)
            case StartUpFailed():
                self._ranks[rank].is_gone = True
                self._started.put(start_up_error(rank, message.failure))
            case _:
                self._lose(rank, f"it sent a message of type {type(message).__name__}, which is not allowed now")

    def _ask(self, rank: int) -> None:
        stream = self._ranks[rank].stream
        assert stream is not None, "every rank has started"
        stream.send(encode(AskActivity()).buffers())

    def _state(self, rank: int) -> str:
        process = self._ranks[rank].process
        return process.state if process is not None else ""

    # -- deaths, in the I/O thread -------------------------------------------------------------------------------

    def _process_ended(self, rank: int) -> None:
        process, stream = self._ranks[rank].process, self._ranks[rank].stream
        assert process is not None
        self._io.loop.remove_reader(process)
        if stream is not None:
            stream.on_end = lambda reason: None  # the reason below, `process.state`, is more exact
            stream.drain()
        self._lose(rank, process.state)

    def _stream_ended(self, rank: int, reason: str) -> None:
        """Wait a moment for the exit code of the process, which is a better reason. A dying process closes its stream first."""
        if self._ranks[rank].process is None or reason.startswith("it sent"):
            self._lose(rank, reason)
        else:
            self._io.loop.call_later(EXIT_CODE_SECONDS, partial(self._lose, rank, reason))

    def _lose(self, rank: int, reason: str) -> None:
        """Mark a rank as lost, because it is gone or can no longer be trusted. Idempotent."""
        state = self._ranks[rank]
        if state.is_gone:
            return
        state.is_gone = True
        state.has_ended.set()
        if state.stream is not None:
            state.stream.close()
        if state.process is not None and not self._terminating:
            state.process.send_signal(signal.SIGKILL)
        if state.is_ready:
            self._rank_died(rank, reason)
        else:
            message = f"rank {rank} could not start: {reason}; see the output of its process"
            self._started.put(WorkerDiedError(message, rank=rank))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        self._terminating = True
        end = self._shutdown_deadline(is_broken=any(state.is_gone for state in self._ranks))
        stop = encode(Stop()).buffers()
        for state in self._ranks:
            if state.is_ready and state.stream is not None:
                state.stream.send(stop)
            elif state.process is not None:  # it is still loading, so nothing is lost if it is killed
                state.process.send_signal(signal.SIGKILL)
        processes = [state.process for state in self._ranks if state.process is not None]
        stop_processes(processes, max(end - time.monotonic(), 0.0))
        if not self._io.is_current:  # if this is the I/O thread, do not wait: nobody else reads the streams
            for state in self._ranks:
                if state.is_ready and state.process is None:
                    state.has_ended.wait(max(end - time.monotonic(), 0.0))
        self._io.stop()
        if self._listener is not None:
            self._listener.close()
        for state in self._ranks:
            if state.stream is not None:
                state.stream.close()
        for process in processes:
            process.close()


class _Rank:
    """What the executor knows about one rank. Written in the I/O thread."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.process: WorkerProcess | None = None  # None if the rank is on another node
        self.is_ready = False
        self.is_gone = False
        self.has_ended = threading.Event()  # set when the stream has ended
