"""`UniProcExecutor`: every rank is a thread of this process, without sockets and without other processes.

The computation releases the interpreter lock (GIL). So, with `non_block`, the caller can plan the next step while the ranks
compute. Messages are passed by reference: no plan, argument or result is copied.

A thread cannot be killed. If a rank waits for another one, `shutdown` ends its wait. If a rank hangs in a call, its thread is
left running, with a warning in the log. It is a daemon thread, so it ends with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from inflight.config.engine import EngineConfig
from inflight.errors import InflightError
from inflight.executor.executor import Executor
from inflight.executor.failures import failure_of, start_up_error
from inflight.executor.worker_loop import WorkerLoop
from inflight.interface.messages import WorkerCommand, WorkerReply
from inflight.interface.worker import Rendezvous, WorkerBase

logger = logging.getLogger(__name__)

WorkerFactory = Callable[[EngineConfig, int, Rendezvous | None], WorkerBase]


class RankThread:
    """A rank that is a thread of this process. The thread constructs the worker, loads the model, runs commands, and shuts the
    worker down.

    Args:
        make_worker: constructs the rank's worker.
        started: called once in the thread: with None if the rank can serve, otherwise with the error.
        reply: called with each reply, in any thread of the rank.
        died: called with the reason if an error has ended the loop.

    Attributes:
        loop: the queue of the rank's commands, and the code that runs them.
    """

    def __init__(
        self,
        rank: int,
        make_worker: Callable[[], WorkerBase],
        *,
        started: Callable[[BaseException | None], None],
        reply: Callable[[WorkerReply], None],
        died: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self.loop = WorkerLoop(rank, reply)
        self._make_worker = make_worker
        self._started, self._died = started, died
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
        worker: WorkerBase | None = None
        try:
            worker = self._make_worker()
            worker.load_model()
        except BaseException as error:  # no caller handles it here; the executor's constructor raises it
            self._end(worker)
            self._started(error)
            return
        self._started(None)
        try:
            self.loop.run(worker)
        except BaseException as error:  # SystemExit, KeyboardInterrupt, or a defect of the protocol
            self._died(repr(error))
        self._end(worker)

    def _end(self, worker: WorkerBase | None) -> None:
        if worker is None:
            return
        try:
            worker.shutdown()
        except BaseException:
            logger.exception("rank %d: shutdown of its worker failed", self._rank)


class UniProcExecutor(Executor):
    """
    Args:
        worker_factory: makes the worker of a rank, in that rank's thread. By default it makes a real `Worker`.

    Raises:
        InflightError: a rank could not start.
    """

    def __init__(self, config: EngineConfig, worker_factory: WorkerFactory | None = None) -> None:
        super().__init__(config)
        factory, self._free_ranks = (worker_factory, None) if worker_factory is not None else _real_workers(config)
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
        if self._free_ranks is not None:
            self._free_ranks()
        end = self._shutdown_deadline()
        for rank_thread in self._ranks:
            rank_thread.join(end)

    def _ask(self, rank: int) -> None:
        self._deliver(self._ranks[rank].loop.report())


def _as_inflight_error(rank: int, error: BaseException | None) -> InflightError | None:
    return error if error is None or isinstance(error, InflightError) else start_up_error(rank, failure_of(error))


def _real_workers(config: EngineConfig) -> tuple[WorkerFactory, Callable[[], None] | None]:
    """Returns a function that makes real workers. If there are several ranks, also returns a function that ends their waits
    for each other, otherwise None."""
    start = time.perf_counter()
    from inflight.worker.worker import (
        Worker,
    )  # not at the top, because this loads torch, which mock workers do not need

    logger.info("libraries were imported in %.2f s", time.perf_counter() - start)
    if config.parallel.world_size == 1:
        return Worker, None
    from inflight.distributed.thread_world import ThreadWorlds  # not at the top, for the same reason

    worlds = ThreadWorlds(config.parallel.layout, config.execute_model_timeout_seconds)
    return lambda config, rank, _: Worker(config, rank, worlds), lambda: worlds.close("the executor was shut down")
