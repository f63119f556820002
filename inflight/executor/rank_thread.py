"""`RankThread`: a rank that is a thread of this process.

The thread does everything that the rank does, in order: constructs the worker, loads the model, runs commands, shuts the
worker down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from inflight.executor.worker_loop import WorkerLoop
from inflight.interface.messages import WorkerReply
from inflight.interface.worker import WorkerBase

logger = logging.getLogger(__name__)


class RankThread:
    """
    Args:
        make_worker: constructs the rank's worker.
        started: called once, in the thread: the rank serves from now on, or it could not start and has ended.
        reply: takes a reply, from any thread of the rank's.
        died: called with the reason if the loop has ended though nobody stopped it.

    Attributes:
        loop: takes the commands.
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
        """Wait for the thread's end until `deadline`, on the clock `time.monotonic()`. Does not wait if the thread has not been
        started, or is the current one (a callback may shut the executor down)."""
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning("rank %d did not end in time and is left behind: %s", self._rank, self.loop.activity)

    def _run(self) -> None:
        worker: WorkerBase | None = None
        try:
            worker = self._make_worker()
            worker.load_model()
        except BaseException as error:  # in a thread there is nobody above: the constructor raises it
            self._end(worker)
            self._started(error)
            return
        self._started(None)
        try:
            self.loop.run(worker)
        except BaseException as error:  # SystemExit, KeyboardInterrupt, or a bug in the protocol
            self._died(repr(error))
        self._end(worker)

    def _end(self, worker: WorkerBase | None) -> None:
        if worker is None:
            return
        try:
            worker.shutdown()
        except BaseException:
            logger.exception("rank %d: shutdown of its worker failed", self._rank)
