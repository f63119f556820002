"""`UniProcExecutor`: every rank is a thread of this process, without sockets and without other processes.

The computation releases the interpreter lock (GIL). So, with `non_block`, the caller can plan the next step while the ranks
compute. Messages are passed by reference: no plan, argument or result is copied.

A thread cannot be killed. If a rank waits for another one, `shutdown` ends its wait. If a rank hangs in a call, its thread is
left running, with a warning in the log, also when a new thread has replaced it. It is a daemon thread, so it ends with the
process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.executor.executor import Executor
from inflight.executor.worker_loop import WorkerLoop
from inflight.interface.messages import WorkerCommand, WorkerReply
from inflight.interface.start_up import BeginEpoch, EpochCommand, EpochReply
from inflight.interface.worker import Rendezvous, WorkerBase

if TYPE_CHECKING:
    from inflight.distributed.thread_world import ThreadWorlds

logger = logging.getLogger(__name__)

WorkerFactory = Callable[[EngineConfig, Place, Rendezvous | None], WorkerBase]


class RankThread:
    """A rank that is a thread of this process. Its first command must be `JoinEpoch`: then the thread constructs the worker and
    loads the model. It shuts the worker down when it ends.

    Args:
        make_worker: constructs the rank's worker, with the rendezvous of the first `JoinEpoch`.
        reply: called with each reply, in any thread of the rank.
        died: called with the reason if an error has ended the loop.

    Attributes:
        loop: the queue of the rank's commands, and the code that runs them.
    """

    def __init__(
        self,
        rank: int,
        make_worker: Callable[[Rendezvous | None], WorkerBase],
        *,
        reply: Callable[[WorkerReply | EpochReply], None],
        died: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self.loop = WorkerLoop(rank, reply, make_worker)
        self._died = died
        self._thread = threading.Thread(target=self._run, name=f"inflight-rank-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, deadline: float) -> None:
        """Wait until the thread has ended, but only until `deadline`, a time of `time.monotonic()`. Does not wait if the thread
        was not started, or if it is the current thread (a callback may shut the executor down)."""
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning(
                "rank %d did not end in time; its thread is left running: %s", self._rank, self.loop.activity
            )

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # SystemExit, KeyboardInterrupt, or a defect of the protocol
            self._died(repr(error))


class UniProcExecutor(Executor):
    """
    Args:
        worker_factory: makes the worker of a rank, in that rank's thread. By default it makes a real `Worker`.

    Raises:
        InflightError: a rank could not start.
    """

    def __init__(self, config: EngineConfig, worker_factory: WorkerFactory | None = None) -> None:
        super().__init__(config)
        self._worker_factory = worker_factory or _real_worker_class()
        self._has_real_workers = worker_factory is None
        self._worlds: ThreadWorlds | None = None
        self._ranks = [self._rank_thread(rank) for rank in range(self.world_size)]
        self._start()

    def _launch(self) -> None:
        for rank, rank_thread in enumerate(self._ranks):
            rank_thread.start()
            self._send(rank, BeginEpoch(epoch=self.meeting.epoch))
        self.join_epoch()

    def _rank_thread(self, rank: int) -> RankThread:
        def died(reason: str) -> None:
            if self._ranks[rank] is rank_thread:  # otherwise the rank was replaced
                self._rank_died(rank, reason)

        make_worker = partial(self._worker_factory, self.config, self.places[rank])
        rank_thread = RankThread(rank, make_worker, reply=self._deliver, died=died)
        return rank_thread

    def _rendezvous(self, addresses: tuple[tuple[str, int], ...]) -> Rendezvous | None:
        if self.world_size == 1 or not self._has_real_workers:
            return None
        from inflight.distributed.thread_world import ThreadWorlds  # not at the top, because this loads torch

        self._worlds = ThreadWorlds(self.config.parallel.layout, self._step_budget)
        return cast("Rendezvous", self._worlds)  # in this process messages are passed by reference, and not encoded

    def _discard(self, rank: int) -> None:
        self._ranks[rank].loop.stop()
        self._ranks[rank] = self._rank_thread(rank)

    def _start_again(self, rank: int) -> None:
        self._ranks[rank].start()
        self._send(rank, BeginEpoch(epoch=self.meeting.epoch))

    def _send(self, rank: int, command: WorkerCommand | EpochCommand) -> None:
        self._ranks[rank].loop.put(command)

    def _terminate(self) -> None:
        for rank_thread in self._ranks:
            rank_thread.loop.stop()
        if self._worlds is not None:
            self._worlds.close("the executor was shut down")
        end = self._shutdown_deadline()
        for rank_thread in self._ranks:
            rank_thread.join(end)

    def _ask(self, rank: int) -> None:
        self._deliver(self._ranks[rank].loop.report())


def _real_worker_class() -> WorkerFactory:
    start = time.perf_counter()
    from inflight.worker.worker import (
        Worker,  # not at the top, because this loads torch, which mock workers do not need
    )

    logger.info("libraries were imported in %.2f s", time.perf_counter() - start)
    return Worker
