"""`ExternalLauncherExecutor`: torchrun starts the same script once per rank, and each process is an engine with one rank.

Every engine makes its own plans and runs them only on its own worker. But the workers of all processes together are one model
replica, so all engines must make the same plans. A plan depends only on the calls of the engine's methods and on the ranks'
replies. The script makes the same calls in all processes. Each engine sends the replies of its rank to all other engines, so
all engines see the same replies:

    _send(own rank) ── RankThread ── reply ──▶ I/O thread ── in order of the commands ──┬─▶ _deliver
                                                                                        ╰─▶ streams to all others
    streams of all others ── held until this engine has submitted the command, too ───────▶ _deliver

If the engines submit different commands, all of them end at once with an error.

After the constructor, only the I/O thread reads and changes the executor's state.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import socket
import threading
import time
from collections import deque
from functools import partial

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.config.ranks import places_on
from inflight.distributed.launcher import LauncherBootstrap
from inflight.errors import CodecError, ConfigError, EngineError
from inflight.executor.executor import Executor
from inflight.executor.failures import failed_reply, failure_of
from inflight.executor.rank_thread import RankThread
from inflight.executor.uniproc import WorkerFactory
from inflight.interface.codec import Message, encode
from inflight.interface.framing import Frame
from inflight.interface.messages import (
    AskActivity,
    ExecuteModel,
    ProvideGrammarOutput,
    ReplyKey,
    RpcCall,
    RpcReply,
    StepReply,
    WorkerActivity,
    WorkerCommand,
    WorkerReply,
)
from inflight.interface.start_up import EpochCommand, EpochReply, JoinEpoch, Ready, StartUpFailed, Stop, Submitted
from inflight.interface.worker import Rendezvous
from inflight.processes.io_thread import IoThread
from inflight.processes.streams import MAX_LINK_SILENCE_SECONDS, IoStream, use_heartbeats
from inflight.worker.worker import Worker

logger = logging.getLogger(__name__)

FAILURE_DELAY_SECONDS = 0.05  # how much later the failure of a step is reported, see `_deliver_reply`


class ExternalLauncherExecutor(Executor):
    """All ranks must call the same methods with the same arguments in the same order. This includes `shutdown`. A lost rank
    cannot be replaced, because the launcher has started it: use the launcher's own restarts.

    Args:
        worker_factory: makes the worker of this rank. Called in the rank's thread.
        me: the rank of this process, as the launcher has told it. If None, it is read from the environment.

    Raises:
        ConfigError: no launcher has started this process, or the number of ranks does not fit the parallel sizes.
        ConnectionError: the ranks did not connect to each other within the time allowed for a step.
        InflightError: a rank could not start. Every rank raises it.
    """

    can_recover = False

    def __init__(
        self, config: EngineConfig, worker_factory: WorkerFactory = Worker, me: envs.LaunchedRank | None = None
    ) -> None:
        self._me = me or envs.launched_rank()
        parallel = config.parallel
        if self._me.world_size != parallel.world_size:
            raise ConfigError(
                f"the launcher has started WORLD_SIZE={self._me.world_size} ranks, but tensor_parallel_size="
                f"{parallel.tensor_parallel_size} x pipeline_parallel_size={parallel.pipeline_parallel_size} = "
                f"{parallel.world_size} are needed; change one of them"
            )
        super().__init__(config)
        self.places = places_on([0 if rank in self._me.local_ranks else 1 for rank in range(self.world_size)])
        atexit.register(self.shutdown)  # even if the script does not call `shutdown`, the other ranks must get Stop
        self._worker_factory = worker_factory
        self._io = IoThread("inflight-io")
        self._peers: dict[int, _Peer] = {}
        self._rank_thread: RankThread | None = None
        self._commands: deque[ReplyKey] = deque()  # commands that this rank has not answered
        self._answers: dict[ReplyKey, StepReply | RpcReply] = {}  # replies of this rank that were not published yet
        self._num_submitted = 0
        self._start()

    # -- start-up --------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        rendezvous: Rendezvous | None = None
        connections: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as until_met:
            if self.world_size > 1:
                bootstrap = until_met.enter_context(contextlib.closing(LauncherBootstrap(self._me, self._step_budget)))
                connections = bootstrap.connections()
                rendezvous = bootstrap.rendezvous(self._table.epoch)
            self._io.start()
            self._io.run(partial(self._watch, connections))
            self._rank_thread = RankThread(
                self._me.rank,
                partial(self._worker_factory, self.config, self.places[self._me.rank]),
                reply=lambda reply: self._io.call_soon(partial(self._answer, reply)),
                died=lambda reason: self._io.call_soon(partial(self._own_rank_died, reason)),
            )
            self._rank_thread.start()
            self._rank_thread.loop.put(JoinEpoch(epoch=self._table.epoch, rendezvous=rendezvous))
            self.meeting.wait_until_all_are_ready()

    def _watch(self, connections: dict[int, socket.socket]) -> None:
        for rank, connection in connections.items():
            use_heartbeats(connection, min(MAX_LINK_SILENCE_SECONDS, self._step_budget))
            stream = IoStream(self._io.loop, connection)
            stream.on_message = partial(self._receive, rank)
            stream.on_end = partial(self._stream_ended, rank)
            self._peers[rank] = _Peer(stream)

    # -- commands and this rank's replies ------------------------------------------------------------------------------

    def _send(self, rank: int, command: WorkerCommand | EpochCommand) -> None:
        """Runs the command on this rank only. The other ranks get it from their own engines."""
        if rank == self._me.rank:
            assert self._rank_thread is not None
            assert not isinstance(command, EpochCommand), "the ranks meet only once"
            if not isinstance(command, ProvideGrammarOutput):  # nobody replies to masks, and every engine makes its own
                self._io.call_soon(partial(self._submit, command))  # before the rank gets the command and can reply
            self._rank_thread.loop.put(command)

    def _submit(self, command: ExecuteModel | RpcCall) -> None:
        self._commands.append(command.key)
        if isinstance(command, ExecuteModel):
            name = f"step {command.key[1]}"
            digest = _digest(encode(command)) if self._peers else ""
        else:
            name = f"{command.method}()"
            digest = ""
        submitted = Submitted(name=name, digest=digest)
        self._num_submitted += 1
        self._send_to_peers(submitted)
        for rank, peer in self._peers.items():
            peer.ours.append(submitted)
            self._compare(rank, peer)
            self._deliver_held(peer)

    def _answer(self, reply: WorkerReply | EpochReply) -> None:
        """Publish this rank's replies in the order of the commands, so that all engines see the same order. The rank itself may
        reply in another order: a step that cannot begin may be answered before an older step."""
        if not isinstance(reply, StepReply | RpcReply):  # the rank has started, or has failed to start
            assert isinstance(reply, Ready | StartUpFailed), reply
            self._send_to_peers(reply)
            self._deliver(reply)
            return
        self._answers[reply.key] = reply
        while self._commands and (answer := self._answers.pop(self._commands[0], None)) is not None:
            self._commands.popleft()
            self._publish(answer)

    def _publish(self, reply: StepReply | RpcReply) -> None:
        try:
            self._send_to_peers(reply)
        except CodecError as error:
            reply = failed_reply(reply, reply.rank, failure_of(error))
            self._send_to_peers(reply)
        self._deliver_reply(reply)

    def _deliver_reply(self, reply: StepReply | RpcReply) -> None:
        """Deliver a reply to the table. The failure of a step is delivered a little later: if the death of a rank is the cause,
        the table must learn of the death first."""
        if isinstance(reply, StepReply) and reply.failure is not None:
            self._io.loop.call_later(FAILURE_DELAY_SECONDS, partial(self._deliver, reply))
        else:
            self._deliver(reply)

    def _send_to_peers(self, message: Message) -> None:
        if self._peers:
            buffers = encode(message).buffers()
            for peer in self._peers.values():
                peer.stream.send(buffers)

    # -- the other ranks -----------------------------------------------------------------------------------------------

    def _receive(self, rank: int, message: Message) -> None:
        peer = self._peers[rank]
        match message:
            case Submitted():
                peer.theirs.append(message)
                self._compare(rank, peer)
            case StepReply() | RpcReply() if message.rank == rank:
                peer.held.append(message)
                self._deliver_held(peer)
            case WorkerActivity() if message.rank == rank:
                self._deliver(message)
            case AskActivity():
                peer.stream.send(encode(self._own_activity()).buffers())
            case Ready() if message.rank == rank and not peer.is_ready:
                peer.is_ready = True
                self._deliver(message)
            case StartUpFailed() if message.rank == rank:
                peer.is_gone = True
                self._deliver(message)
            case Stop():
                peer.has_stopped.set()
                self._compare(rank, peer)
            case _:
                self._lose(rank, f"it sent a message of type {type(message).__name__}, which is not allowed now")

    def _deliver_held(self, peer: _Peer) -> None:
        """Deliver those replies of a peer whose commands this engine has submitted, too. Hold the others, because the table
        drops replies to unknown commands."""
        while peer.held and peer.num_delivered < self._num_submitted:
            peer.num_delivered += 1
            self._deliver_reply(peer.held.popleft())

    def _compare(self, rank: int, peer: _Peer) -> None:
        while peer.ours and peer.theirs:
            ours, theirs = peer.ours.popleft(), peer.theirs.popleft()
            if ours != theirs:
                what = "another plan for " if ours.name == theirs.name else ""
                self._lose(
                    rank,
                    f"it runs {what}{theirs.name} while rank {self._me.rank} runs {ours.name}: with external_launcher all "
                    "ranks must make the same calls with the same arguments",
                )
                return
        if peer.ours and peer.has_stopped.is_set():
            self._lose(rank, f"it has shut its engine down, but rank {self._me.rank} has submitted {peer.ours[0].name}")

    def _stream_ended(self, rank: int, reason: str) -> None:
        """Ignore the end of the stream if the peer has sent Stop and has answered every command. Otherwise the rank is lost."""
        peer = self._peers[rank]
        if not peer.has_stopped.is_set() or peer.num_delivered < self._num_submitted:
            self._lose(rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        """Mark a rank as lost, because it is gone or can no longer be trusted. Idempotent."""
        peer = self._peers[rank]
        peer.has_stopped.set()
        if peer.is_gone:
            return
        peer.is_gone = True
        peer.stream.close()
        if peer.is_ready:
            self._rank_died(rank, reason)
        else:
            error = EngineError(f"rank {rank} could not start: {reason}; see the output of its process")
            self.meeting.fail(rank, error)

    def _own_rank_died(self, reason: str) -> None:
        """Note that this engine's own rank has died. The other engines see that their streams to this engine end."""
        for peer in self._peers.values():
            peer.is_gone = True
            peer.stream.close()
            peer.has_stopped.set()
        self._rank_died(self._me.rank, reason)

    def _ask(self, rank: int) -> None:
        if rank == self._me.rank:
            self._deliver(self._own_activity())
        else:
            self._peers[rank].stream.send(encode(AskActivity()).buffers())

    def _own_activity(self) -> WorkerActivity:
        assert self._rank_thread is not None
        return self._rank_thread.loop.report()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        """Stop this rank. First wait until the other ranks stop, because a slower rank still needs this rank's replies."""
        atexit.unregister(self.shutdown)
        end = self._shutdown_deadline(is_broken=any(p.is_gone or not p.is_ready for p in self._peers.values()))
        self._io.call_soon(partial(self._send_to_peers, Stop()))
        if not self._io.is_current:  # if this is the I/O thread, do not wait: nobody else reads the streams
            for peer in self._peers.values():
                peer.has_stopped.wait(max(end - time.monotonic(), 0.0))
        if self._rank_thread is not None:
            self._rank_thread.loop.stop()
        self._io.stop()
        for peer in self._peers.values():
            peer.stream.close()
        if self._rank_thread is not None:
            self._rank_thread.join(max(end, time.monotonic() + 0.1))


class _Peer:
    """What the executor knows about another rank."""

    def __init__(self, stream: IoStream) -> None:
        self.stream = stream
        self.is_ready = False
        self.is_gone = False
        self.has_stopped = threading.Event()  # the peer submits no more commands
        self.ours: deque[Submitted] = deque()  # commands that only this engine has submitted so far
        self.theirs: deque[Submitted] = deque()  # commands that only the peer has submitted so far
        self.held: deque[StepReply | RpcReply] = deque()  # replies to commands that this engine has not submitted yet
        self.num_delivered = 0  # how many replies of the peer have been delivered


def _digest(frame: Frame) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for buffer in frame.buffers():
        digest.update(buffer)
    return digest.hexdigest()
