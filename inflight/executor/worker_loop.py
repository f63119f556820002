"""`WorkerLoop`: the main loop of a rank (command_loop.py), which takes part in epochs (recovery.py).

`BeginEpoch` ends all work of older epochs, and `JoinEpoch` constructs the worker, or connects it to the other ranks again.
"""

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from inflight.errors import LostPeerError
from inflight.executor.command_loop import CommandLoop
from inflight.executor.failures import failure_of
from inflight.interface.messages import WorkerReply
from inflight.interface.start_up import BeginEpoch, EpochReply, JoinEpoch, Listening, Ready, StartUpFailed
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.sockets import REACH_SECONDS, listen, unreachable

logger = logging.getLogger(__name__)

NO_ADDRESS = ("", 0)


class WorkerLoop(CommandLoop):
    """A new epoch begins in two parts. `put`, in the thread that reads the commands, ends the waits for other ranks and
    raises the number of the epoch. Then the loop drops the commands of older epochs, waits until the worker is idle, and
    replies.

    Args:
        reply: see `CommandLoop`.
        make_worker: constructs the worker of this rank, with the rendezvous of the first `JoinEpoch`.
        host: the address at which the rank listens for the other ranks. None if the ranks are threads.
        called: the ranks to which this rank opens connections.

    Attributes:
        has_failed: whether the worker could not be constructed.
    """

    def __init__(
        self,
        rank: int,
        reply: Callable[[WorkerReply | EpochReply], None],
        make_worker: Callable[[Rendezvous | None], WorkerBase],
        host: str | None = None,
        called: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, reply)
        self._make_worker = make_worker
        self._host = host
        self._called = called
        self._listener: socket.socket | None = None  # from `BeginEpoch` to `JoinEpoch`
        self._begun_epoch = -1  # of the last `BeginEpoch`
        self._first_listener: socket.socket | None = None  # a duplicate, while the worker is constructed
        self.has_failed = False

    def _leave_epoch(self) -> None:
        if self._worker is not None:
            self._worker.leave_groups("a new epoch begins")
        elif (listener := self._first_listener) is not None:
            with contextlib.suppress(OSError):  # it may just have been closed
                listener.shutdown(socket.SHUT_RDWR)  # the constructor of the worker stops waiting for other ranks

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _begin_epoch(self, command: BeginEpoch) -> None:
        self._num_dropped += len(self._waiting)
        self._waiting.clear()
        try:
            if self._worker is not None:
                self._worker.end_steps()
            # A new process gets the number of its epoch with `StartUp`, and perhaps once more in a `BeginEpoch`. It must not
            # change its address: others may know the first one already.
            if self._host is not None and (self._listener is None or self._begun_epoch != command.epoch):
                if self._listener is not None:  # the epoch before has ended without `JoinEpoch`
                    self._listener.close()
                self._listener = listen(self._host, 0)
        except Exception as error:  # the executor replaces this rank
            logger.exception("this rank cannot begin epoch %d", command.epoch)
            self._reply(StartUpFailed(rank=self._rank, failure=failure_of(error), epoch=command.epoch))
            return
        self._begun_epoch = command.epoch
        self._steps.clear()
        with self._lock:
            self._unanswered.clear()
        host, port = NO_ADDRESS if self._listener is None else self._listener.getsockname()[:2]
        dropped, self._num_dropped = self._num_dropped, 0
        self._reply(Listening(rank=self._rank, epoch=command.epoch, address=(host, port), num_dropped=dropped))

    def _join_epoch(self, command: JoinEpoch) -> None:
        rendezvous = command.rendezvous
        if lost := self._unreachable(command):
            # the listener stays open, so this rank is not lost for the others, too, and they report only links that are broken
            message = f"rank {self._rank} cannot reach ranks {', '.join(map(str, lost))}"
            failure = failure_of(LostPeerError(message, *lost))
            self._reply(StartUpFailed(rank=self._rank, failure=failure, epoch=command.epoch))
            return
        if self._listener is not None:
            listener, self._listener = self._listener, None
            if rendezvous is None:
                listener.close()
            else:
                self._first_listener = listener.dup() if self._worker is None else None
                rendezvous = replace(rendezvous, listen_fd=listener.detach())
        self._epoch = max(self._epoch, command.epoch)
        self._method = "join_epoch"
        try:
            if self._worker is None:
                self._worker = self._loaded_worker(rendezvous)
                if command.epoch < self._epoch:  # `put` may have found no worker
                    self._worker.leave_groups("a new epoch begins")
            else:
                self._worker.join_epoch(rendezvous)
        except BaseException as error:  # also SystemExit, because the executor must get the reason
            failure = failure_of(error)
            self._reply(StartUpFailed(rank=self._rank, failure=failure, epoch=command.epoch))
            # if other ranks are the reason, this rank tries again in the next epoch, with its libraries imported
            if self._worker is None and not failure.is_echo and command.epoch == self._epoch:
                self._is_stopped = self.has_failed = True
            return
        finally:
            self._method = ""
            if self._first_listener is not None:
                listener, self._first_listener = self._first_listener, None
                listener.close()
        self._reply(Ready(rank=self._rank, epoch=command.epoch))

    def _unreachable(self, command: JoinEpoch) -> tuple[int, ...]:
        """The ranks that this rank must connect to, but cannot reach."""
        if not isinstance(command.rendezvous, Rendezvous):  # ranks that are threads of one process have no addresses
            return ()
        addresses = {rank: command.rendezvous.addresses[rank] for rank in self._called}
        return unreachable(addresses, REACH_SECONDS, lambda: self._epoch > command.epoch or self._is_stopped)

    def _loaded_worker(self, rendezvous: Rendezvous | None) -> WorkerBase:
        worker = self._make_worker(rendezvous)
        try:
            worker.load_model()
        except BaseException:
            worker.shutdown()
            raise
        return worker
