"""`UniProcExecutor`: every rank is a thread of this process, and several ranks meet in it as threads do: no process, no socket.

A rank's thread does everything that the rank does, in order: constructs the worker, loads the model, runs commands from its
inbox, shuts the worker down. So a caller with `non_block` plans the next step meanwhile (the compute itself releases the
interpreter lock). Messages pass by reference: no copy is made of a plan, an argument or a result.

A thread cannot be killed. A rank that waits for another one is freed at `shutdown`; one that hangs in a call is left behind,
with a warning: it is a daemon thread and ends with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from inflight.config.engine import EngineConfig
from inflight.errors import InflightError, WorkerDiedError
from inflight.executor.executor import Executor
from inflight.executor.worker_loop import WorkerLoop, failure_of
from inflight.interface.messages import WorkerCommand
from inflight.interface.worker import Rendezvous, WorkerBase

logger = logging.getLogger(__name__)

MAX_SHUTDOWN_SECONDS = 5.0  # for all ranks together; less if the budget of a step is less

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
        self._ranks = [_RankThread(self, rank, factory) for rank in range(self.world_size)]
        self._started: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._start()

    def _launch(self) -> None:
        for rank_thread in self._ranks:
            rank_thread.start()
        for _ in self._ranks:
            rank, error = self._started.get()
            if isinstance(error, InflightError):
                raise error
            if error is not None:
                failure = failure_of(error)
                message = f"rank {rank} could not start: {failure.type_name}: {failure.message}"
                raise WorkerDiedError(message, rank=rank, worker_traceback=failure.traceback) from error

    def rank_started(self, rank: int, error: BaseException | None) -> None:
        """Called once by each rank's thread: it serves from now on, or it could not start and has ended."""
        self._started.put((rank, error))

    def _send(self, rank: int, command: WorkerCommand) -> None:
        self._ranks[rank].inbox.put(command)

    def _terminate(self) -> None:
        for rank_thread in self._ranks:
            rank_thread.stop()
        self._release()
        end = time.monotonic() + min(MAX_SHUTDOWN_SECONDS, self._step_budget)
        for rank_thread in self._ranks:
            if not rank_thread.join(max(end - time.monotonic(), 0.0)):
                logger.warning(
                    "rank %d did not end in time and is left behind: %s", rank_thread.rank, rank_thread.activity
                )

    def _activity(self, rank: int) -> str:
        return self._ranks[rank].activity


class _RankThread:
    """The thread of one rank and its inbox."""

    def __init__(self, executor: UniProcExecutor, rank: int, factory: WorkerFactory) -> None:
        self.rank = rank
        self.inbox: SimpleQueue[WorkerCommand | None] = SimpleQueue()
        self._executor = executor
        self._factory = factory
        self._stopping = False
        self._loop: WorkerLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"inflight-rank-{rank}", daemon=True)

    @property
    def activity(self) -> str:
        return self._loop.activity if self._loop is not None else "starting"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the current command; those still in the inbox are not run."""
        self._stopping = True
        self.inbox.put(None)

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended (or never started). It may be the thread itself that asks, from a callback."""
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _receive(self) -> WorkerCommand | None:
        command = self.inbox.get()
        return None if self._stopping else command

    def _run(self) -> None:
        worker: WorkerBase | None = None
        try:
            worker = self._factory(self._executor.config, self.rank, None)
            worker.load_model()
        except BaseException as error:  # in a thread there is nobody above: the constructor raises it
            self._end(worker)
            self._executor.rank_started(self.rank, error)
            return
        self._loop = WorkerLoop(worker, self.rank, self._receive, self._executor._deliver)
        self._executor.rank_started(self.rank, None)
        try:
            self._loop.run()
        except BaseException as error:  # SystemExit, KeyboardInterrupt, or a bug in the protocol
            self._executor._rank_died(self.rank, repr(error))
        self._end(worker)

    def _end(self, worker: WorkerBase | None) -> None:
        if worker is None:
            return
        try:
            worker.shutdown()
        except BaseException:
            logger.exception("rank %d: shutdown of its worker failed", self.rank)


def _real_workers(config: EngineConfig) -> tuple[WorkerFactory, Callable[[], None]]:
    """What makes the workers, and what frees those that wait for each other."""
    from inflight.worker.worker import Worker  # loads torch, which an executor of other workers does not need

    if config.parallel.world_size == 1:
        return Worker, _nothing
    from inflight.distributed.thread_world import ThreadWorlds  # as above

    worlds = ThreadWorlds(config.parallel.layout, config.execute_model_timeout_seconds)
    return lambda config, rank, _: Worker(config, rank, worlds), lambda: worlds.close("the executor was shut down")


def _nothing() -> None:
    """Workers that a test brings are freed by the test."""
