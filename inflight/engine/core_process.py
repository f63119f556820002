"""`CoreServer`: serves front ends with one `EngineCore`, in a process of its own; `core_main` is its program.

    front end 0  <== socket ==>  inbox thread ---> arrivals ---> step loop (main thread) ---> outbox, sender thread
    front end 1  <== socket ==>  inbox thread --->    "              "          "        --->   "          "

The step loop alone touches the core. It sleeps on the arrivals while there is no request; while there are some, what arrives
is taken in right before the next plan, and wakes the loop if more steps may be in flight than there are. Nothing that a front
end does, or does not do, holds it up. Side effects:

1. A front end whose stream ends, or which sends what is no frame, is forgotten with all its requests.
2. When the last one is gone the loop ends; a start is cut off on the spot, a step that hangs after `MAX_END_SECONDS`.
3. If a step fails, its requests end with an error, and the loop goes on. If the core is dead then, the process ends: it sends
   the front ends the reason, and they end their requests themselves. If a rank dies while there are no requests, this is
   noticed, too.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from inflight.engine.core import EngineCore
from inflight.engine.outbox import Outbox
from inflight.errors import CodecError, EngineDeadError, EngineError, RankError
from inflight.executor.executor import Executor
from inflight.executor.transport import EXIT_STREAM_ENDED, BlockingStream
from inflight.interface.codec import Message
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.interface.serving import AbortRequests, AddRequest, EngineDied, PrefixCacheReset, ResetPrefixCache
from inflight.interface.step import ModelRunnerOutput

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.05  # between two reports, at least
BUSY_COLLECTION_SECONDS, IDLE_COLLECTION_SECONDS = 60.0, 1.0  # between two collections of garbage, at least
MAX_END_SECONDS = 15.0  # after the last front end has gone
MAX_GOODBYE_SECONDS = 1.0  # to tell a front end that the engine has failed


class FrontEndLink:
    """One front end, as the core sees it. `request_ids`: its sequences in the core. `num_received`: all that came."""

    def __init__(self, index: int, stream: BlockingStream) -> None:
        self.index = index
        self.stream = stream
        self.outbox = Outbox(stream, f"inflight-outbox-{index}")
        self.request_ids: set[str] = set()
        self.num_received = 0


class CoreServer:
    """Created and run in the process's main thread. `links`: all front ends there will be."""

    def __init__(self, links: Sequence[FrontEndLink]) -> None:
        self._links = list(links)
        # (link, message); (link, None): the front end is gone; None: the executor has an event, or a step is done
        self._arrivals: SimpleQueue[tuple[FrontEndLink, Message | None] | None] = SimpleQueue()
        self._owners: dict[str, FrontEndLink] = {}  # of every sequence in the core
        self._awaited: Future[ModelRunnerOutput] | None = None  # the last step whose end wakes `_wait_for_arrival`
        self._num_streams = len(self._links)
        self._lock = threading.Lock()  # of `_num_streams`
        self._is_running = False
        self._next_report = 0.0
        self._last_collection = time.monotonic()
        self._is_reported = False  # the front ends know how the engine stands

    def start_reading(self) -> None:
        """From now on the end of all streams is noticed, in the middle of a start, too."""
        for link in self._links:
            name = f"inflight-inbox-{link.index}"
            threading.Thread(target=self._read, args=(link,), name=name, daemon=True).start()

    def tell_all(self, message: Message) -> None:
        for link in self._links:
            link.outbox.send(message)

    def say_goodbye(self) -> None:
        for link in self._links:
            link.outbox.close(MAX_GOODBYE_SECONDS)

    def run(self, core: EngineCore, executor: Executor) -> None:
        """The step loop, until all front ends are gone.

        Raises:
            EngineError: a rank is lost; the front ends have been told.
        """
        self._core = core
        self._is_running = True
        core.before_plan = self._take_arrivals
        core.wait_for_arrival = self._wait_for_arrival
        executor.set_death_callback(lambda: self._arrivals.put(None))
        try:
            while self._links:
                if core.has_unfinished_requests():
                    self._step()
                else:
                    core.check_ranks()
                    if not self._is_reported:
                        self._distribute((), report=True)
                    self._collect_garbage(IDLE_COLLECTION_SECONDS)
                    self._take(self._arrivals.get())
                self._take_arrivals()
        except Exception as error:
            summary = error.summary if isinstance(error, RankError | EngineDeadError) else ""
            self.tell_all(EngineDied(reason=first_line(error), summary=summary))
            raise

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except EngineError as error:
            if self._core.is_dead:
                raise
            self._fail_step(error)
            return
        self._is_reported = False
        self._distribute(outputs, report=time.monotonic() >= self._next_report)
        self._collect_garbage(BUSY_COLLECTION_SECONDS)

    def _collect_garbage(self, seconds: float) -> None:
        """If the last time was so long ago. Left to itself Python does it in a step, for 5 ms at 256 requests."""
        now = time.monotonic()
        if now - self._last_collection >= seconds:
            gc.collect()
            self._last_collection = now

    # -- in --------------------------------------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        """Whatever has come. In the main thread, right before each plan."""
        while not self._arrivals.empty():
            self._take(self._arrivals.get())

    def _wait_for_arrival(self, step: Future[ModelRunnerOutput]) -> bool:
        """Until `step` is done, or something has arrived; whether it has."""
        if step is not self._awaited:
            self._awaited = step
            step.add_done_callback(lambda _: self._arrivals.put(None))
        while not step.done():
            arrival = self._arrivals.get()
            if arrival is not None:
                self._take(arrival)
                return True
        return False

    def _take(self, arrival: tuple[FrontEndLink, Message | None] | None) -> None:
        if arrival is None:
            return
        link, message = arrival
        match message:
            case AddRequest():
                for child in message.children:
                    self._owners[child.request_id] = link
                    link.request_ids.add(child.request_id)
                    link.num_received += 1
                    self._core.add_request(child)
            case AbortRequests():
                self._abort(link, link.request_ids.intersection(message.request_ids))
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
                link.outbox.send(PrefixCacheReset(call_id=message.call_id))
            case None:
                logger.info("front end %d is gone, with %d sequences", link.index, len(link.request_ids))
                self._abort(link, set(link.request_ids))
                self._links.remove(link)
        self._is_reported = False

    def _abort(self, link: FrontEndLink, request_ids: set[str]) -> None:
        self._core.abort_requests(request_ids)
        link.request_ids -= request_ids
        for request_id in request_ids:
            del self._owners[request_id]

    def _read(self, link: FrontEndLink) -> None:
        """A thread for each front end: it only reads, so that the end of the stream is seen whatever the core does."""
        try:
            while (message := link.stream.receive(ALLOWED)) is not None:
                self._arrivals.put((link, message))
        except OSError as error:
            logger.debug("the stream of front end %d was lost: %s", link.index, error)
        except CodecError as error:
            logger.error("front end %d is dropped: %s", link.index, error)
        self._arrivals.put((link, None))
        with self._lock:
            self._num_streams -= 1
            is_last = self._num_streams == 0
        if is_last:
            if self._is_running:
                time.sleep(MAX_END_SECONDS)
            os._exit(EXIT_STREAM_ENDED)

    # -- out -------------------------------------------------------------------------------------------------------

    def _distribute(self, outputs: Sequence[EngineCoreOutput], *, report: bool) -> None:
        """To each front end what is its own; and to all the engine's state, if they are to have a `report`."""
        stats = None
        if report:
            stats = self._core.take_stats()
            self._next_report, self._is_reported = time.monotonic() + STATS_SECONDS, True
        owners = self._owners
        by_link: dict[FrontEndLink, list[EngineCoreOutput]] = {link: [] for link in self._links}
        for output in outputs:
            link = owners[output.request_id]
            by_link[link].append(output)
            if output.finish_reason is not None:
                del owners[output.request_id]
                link.request_ids.remove(output.request_id)
        for link, own in by_link.items():
            if own or stats is not None:
                link.outbox.put(own, link.num_received, stats)

    def _fail_step(self, error: EngineError) -> None:
        """End the requests of the step that failed; if the error does not name them, all requests. The others wait with their
        tokens and are computed again. This cannot go on for ever, because each failure ends at least one request."""
        reason = f"the engine failed: {first_line(error)}"
        named = error.request_ids if isinstance(error, RankError) else ()
        failed = [request_id for request_id in named if request_id in self._owners] or list(self._owners)
        self._core.abort_requests(failed)
        self._distribute(_failures(failed, reason), report=True)


ALLOWED = (AddRequest, AbortRequests, ResetPrefixCache)


def _failures(request_ids: Iterable[str], reason: str) -> list[EngineCoreOutput]:
    return [
        EngineCoreOutput(
            request_id=request_id,
            new_token_ids=(),
            finish_reason=FinishReason.ERROR,
            error=reason,
            engine_failed=True,
        )
        for request_id in request_ids
    ]


def first_line(error: BaseException) -> str:
    """Without the traceback of a worker, which the log has."""
    return (str(error).splitlines() or [type(error).__name__])[0]
