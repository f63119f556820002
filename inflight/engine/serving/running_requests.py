"""`RunningRequests`: the unfinished requests of a front end, and the queues that their readers read.

`Replicas` gives it what the engines send. It does not refer to the `AsyncLLM`, so the event loop may keep it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from inflight.engine.process.remote_replica import Keeper
from inflight.engine.request.output_processor import OutputProcessor, Update
from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.admission import Drain
from inflight.engine.serving.output_stream import OutputQueue
from inflight.errors import EngineClosedError, EngineDeadError
from inflight.metrics.observer import EngineObserver
from inflight.metrics.observers import Observers
from inflight.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RunningRequests:
    """Used on the event loop.

    Args:
        keepers: who has started the engines' processes, if this front end has.

    Attributes:
        outputs: the states of the requests.
        observers: are told of what happens.
        drain: whether new requests are refused.
        death: why the last engine has died; "" while one lives.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, observers: Sequence[EngineObserver] = (), keepers: Sequence[Keeper] = ()
    ) -> None:
        self.outputs = OutputProcessor(tokenizer, observers)
        self.observers = Observers(observers)
        self.drain = Drain()
        self.death = ""
        self._summary = ""  # `death`, as clients may see it
        self._keepers = keepers
        self._queues: dict[str, OutputQueue] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, request: ProcessedRequest, kind: RequestOutputKind) -> OutputQueue:
        queue = OutputQueue(self.outputs.add_request(request, kind))
        self._queues[request.request_id] = queue
        self.drain.record_running(len(self._queues))
        return queue

    def limit_time(self, request: ProcessedRequest, timeout: float, expire: Callable[[str, float], None]) -> None:
        """Call `expire` with the request's id and `timeout` if the request has not ended so many seconds after its arrival."""
        left = max(request.arrival_time + timeout - time.monotonic(), 0.0)
        timer = asyncio.get_running_loop().call_later(left, expire, request.request_id, timeout)
        self._queues[request.request_id].timer = timer

    def publish(self, update: Update) -> None:
        """Let the readers of changed requests read, and forget the requests that have ended."""
        for state in update.changed:
            queue = self._queues[state.request.request_id]
            if state.has_output:
                queue.notify()
            if state.finished:
                del self._queues[state.request.request_id]
                if queue.timer is not None:
                    queue.timer.cancel()
        self.drain.record_running(len(self._queues))

    def fail(self, request_ids: Iterable[str], error: Exception) -> None:
        """Let the streams of these requests end with `error`. Then abort the requests."""
        for request_id in request_ids:
            self._queues[request_id].fail(error)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The engine is closed: from now on `check_open` raises."""
        self._is_closed = True

    def record_death(self, reason: str, summary: str) -> None:
        """The last engine has died. `summary` is the reason as clients may see it."""
        self._summary = summary
        if not self._is_closed:
            self.death = reason
            logger.error("%s; %d requests were running", reason, len(self._queues))

    def check_open(self) -> None:
        """
        Raises:
            EngineClosedError: `close` was called.
            EngineDeadError: the last engine has died.
        """
        if self.death or self._is_closed:
            raise self.end_error()

    def end_error(self) -> EngineClosedError | EngineDeadError:
        """Returns the error with which requests end when no engine is left."""
        if not self.death:
            return EngineClosedError("the engine was closed; make a new one")
        text = self.death
        ended = [keeper.state for keeper in self._keepers if keeper.has_ended]
        if ended and ended[-1] not in text:
            text = f"{text}: {ended[-1]}"
        return EngineDeadError(text, summary=self._summary)
