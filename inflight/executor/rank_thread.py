"""`RankThread`: a rank that is a thread."""

import logging
import threading
import time
from collections.abc import Callable

from inflight.executor.worker_loop import WorkerLoop
from inflight.interface.messages import WorkerReply
from inflight.interface.start_up import EpochReply
from inflight.interface.worker import Rendezvous, WorkerBase

logger = logging.getLogger(__name__)


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
