"""`UniProcExecutor`: every rank is a thread of this process, and several ranks meet in it as threads do: no process, no socket.

A caller with `non_block` plans the next step while the ranks work (the compute itself releases the interpreter lock).
Messages pass by reference: no copy is made of a plan, an argument or a result.

A thread cannot be killed. A rank that waits for another one is freed at `shutdown`; one that hangs in a call is left behind,
with a warning: it is a daemon thread and ends with the process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from inflight.config.engine import EngineConfig
from inflight.errors import InflightError
from inflight.executor.executor import Executor
from inflight.executor.rank_thread import RankThread
from inflight.executor.worker_loop import failure_of, start_up_error
from inflight.interface.messages import WorkerCommand
from inflight.interface.worker import Rendezvous, WorkerBase

logger = logging.getLogger(__name__)

WorkerFactory = Callable[[EngineConfig, int, Rendezvous | None], WorkerBase]


class UniProcExecutor(Executor):
    """
    Args:
        worker_factory: makes the worker of a rank, in that rank's thread; the default is the real `Worker`.

    Raises:
        InflightError: a rank could not start.
    """

    def __init__(self, config: EngineConfig, worker_factory: WorkerFactory | None = None) -> None:
        super().__init__(config)
        factory, self._release = (worker_factory, _nothing) if worker_factory else _real_workers(config)
        self._ranks = [self._rank_thread(rank, factory) for rank in range(self.world_size)]
        self._start()

    def _launch(self) -> None:
        for rank_thread in self._ranks:
            rank_thread.start()
        self._wait_until_started()

    def _rank_thread(self, rank: int, factory: WorkerFactory) -> RankThread:
        return RankThread(
            rank,
            partial(factory, self.config, rank, None),
            started=lambda error: self._started.put(_as_inflight_error(rank, error)),
            reply=self._deliver,
            died=partial(self._rank_died, rank),
        )

    def _send(self, rank: int, command: WorkerCommand) -> None:
        self._ranks[rank].loop.put(command)

    def _terminate(self) -> None:
        for rank_thread in self._ranks:
            rank_thread.loop.stop()
        self._release()
        end = self._shutdown_deadline()
        for rank_thread in self._ranks:
            rank_thread.join(end)

    def _ask(self, rank: int) -> None:
        self._deliver(self._ranks[rank].loop.report())


def _as_inflight_error(rank: int, error: BaseException | None) -> InflightError | None:
    return error if error is None or isinstance(error, InflightError) else start_up_error(rank, failure_of(error))


def _real_workers(config: EngineConfig) -> tuple[WorkerFactory, Callable[[], None]]:
    """What makes the workers, and what frees those that wait for each other."""
    start = time.perf_counter()
    from inflight.worker.worker import Worker  # loads torch, which an executor of other workers does not need

    logger.info("libraries were imported in %.2f s", time.perf_counter() - start)
    if config.parallel.world_size == 1:
        return Worker, _nothing
    from inflight.distributed.thread_world import ThreadWorlds  # as above

    worlds = ThreadWorlds(config.parallel.layout, config.execute_model_timeout_seconds)
    return lambda config, rank, _: Worker(config, rank, worlds), lambda: worlds.close("the executor was shut down")


def _nothing() -> None:
    """Workers that a test brings are freed by the test."""
