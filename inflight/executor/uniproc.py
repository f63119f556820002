"""`UniProcExecutor`: every rank is a thread of this process, without sockets and without other processes.

The computation releases the interpreter lock (GIL). So, with `non_block`, the caller can plan the next step while the ranks
compute. Messages are passed by reference: no plan, argument or result is copied.

A thread cannot be killed. If a rank waits for another one, `shutdown` ends its wait. If a rank hangs in a call, its thread is
left running, with a warning in the log, also when a new thread has replaced it. It is a daemon thread, so it ends with the
process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.executor.executor import Executor
from inflight.executor.rank_thread import RankThread
from inflight.interface.messages import WorkerCommand
from inflight.interface.start_up import BeginEpoch, EpochCommand
from inflight.interface.worker import Rendezvous, WorkerBase

if TYPE_CHECKING:
    from inflight.distributed.thread_world import ThreadWorlds

logger = logging.getLogger(__name__)

WorkerFactory = Callable[[EngineConfig, Place, Rendezvous | None], WorkerBase]


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
