"""`FairThreads`: a few threads for the work on images. If jobs wait, their clients take turns (`FairQueue`).

A job that runs cannot be interrupted. Its client pays for the time that it took. A job that is cancelled while it waits leaves
the queue at once, with its image. Several clients may wait for one job: it has a place in the queue for each of them, and runs
when the first of these places is due.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from inflight.errors import EngineClosedError, OverloadedError
from inflight.fair_queue import FairQueue, Waiting

T = TypeVar("T")
RETRY_SECONDS = 1


@dataclass(eq=False, slots=True)
class _Job(Generic[T]):
    """
    Attributes:
        function: gets the number of the thread that runs it.
        places: for each client that waits for it, its place in the queue.
    """

    function: Callable[[int], T]
    seconds: float
    size: int
    future: Future[T] = field(default_factory=Future)
    places: dict[str, Waiting["_Job[Any]"]] = field(default_factory=dict)


class FairThreads:
    """Any thread may call the methods. Threads start when they are needed.

    Args:
        max_size: the most that may wait, in the unit of `submit`'s `size`. More is refused. A client "" is a program that uses
            the engine itself. It is never refused, because it decides itself how much it sends.
        what: what waits, for error messages, such as "images wait to be processed".
        at_end: called by each thread before it ends, with its number.
    """

    def __init__(
        self, name: str, num_threads: int, max_size: int, what: str, at_end: Callable[[int], None] = lambda number: None
    ) -> None:
        self._name = name
        self._num_threads = num_threads
        self._what = what
        self._at_end = at_end
        self._changed = threading.Condition()  # for the rest
        self._queue = FairQueue[_Job[Any]](max_size)
        self._waiting: dict[Future[Any], _Job[Any]] = {}
        self._num_running = 0
        self._num_threads_started = 0
        self._is_closed = False

    def submit(self, function: Callable[[int], T], client: str, seconds: float, size: int = 1) -> Future[T]:
        """Run `function` in a thread. The future can be cancelled while the job waits. It gets what the function returns or
        raises, or an `OverloadedError` if another client needs its place.

        Args:
            seconds: how long it is expected to take.
            size: how much of the queue it takes up, such as bytes.

        Raises:
            OverloadedError: too much waits, and no client has more of it than this one would have.
            EngineClosedError: `close` was called.
        """
        job = _Job(function, seconds, size)
        losers: list[_Job[Any]] = []
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the engine was closed; make a new one")
            is_refused = False
            while client and not (is_refused := self._queue.is_full_for(client, size)):
                if (newest := self._queue.take_newest(size)) is None:
                    break
                losers += self._lose(newest)
            if not is_refused:
                self._waiting[job.future] = job
                job.places[client] = self._queue.add(job, client, seconds, size)
                self._start_thread()
                self._changed.notify()
        for each in losers:  # not with the lock: a future calls functions that may wait for other locks
            _fail(each.future, self._refusal())
        if is_refused:
            raise self._refusal()
        job.future.add_done_callback(self._leave)  # it may be cancelled
        return job.future

    def share(self, future: Future[Any], client: str) -> None:
        """Another client waits for a job that was submitted. Does nothing if the job no longer waits."""
        with self._changed:
            job = self._waiting.get(future)
            if job is not None and client not in job.places:
                job.places[client] = self._queue.add(job, client, job.seconds, job.size)

    def close(self) -> None:
        """End the threads after their present jobs, and fail the jobs that wait. Idempotent."""
        with self._changed:
            self._is_closed = True
            left = list(self._waiting.values())
            for job in left:
                self._remove(job)
            self._changed.notify_all()
        for job in left:
            _fail(job.future, EngineClosedError("the engine was closed"))

    def _start_thread(self) -> None:
        if self._num_threads_started < min(len(self._waiting) + self._num_running, self._num_threads):
            number = self._num_threads_started
            self._num_threads_started += 1
            name = f"inflight-{self._name}-{number}"
            threading.Thread(target=self._run, args=[number], name=name, daemon=True).start()

    def _run(self, number: int) -> None:
        """In a thread."""
        while (taken := self._take()) is not None:
            job = taken.job
            start = time.monotonic()
            has_begun = job.future.set_running_or_notify_cancel()
            result = None
            error = None
            try:
                result = job.function(number) if has_begun else None
            except BaseException as raised:
                error = raised
            with self._changed:
                self._queue.end(taken, time.monotonic() - start)
                self._num_running -= 1
            if error is not None:
                job.future.set_exception(error)
            elif has_begun:
                job.future.set_result(result)
            del taken, job, result, error  # an image may be large, and the next one may come late
        self._at_end(number)

    def _take(self) -> Waiting[_Job[Any]] | None:
        """Waits for the next job. Returns None when the threads are to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return None
            taken = self._queue.take_next()
            taken.job.places = {client: place for client, place in taken.job.places.items() if place is not taken}
            self._remove(taken.job)
            self._num_running += 1
            return taken

    def _leave(self, future: Future[Any]) -> None:
        with self._changed:
            if (job := self._waiting.get(future)) is not None:
                self._remove(job)

    def _remove(self, job: _Job[Any]) -> None:
        """Take a job, with all its places, out of the queue."""
        for place in job.places.values():
            self._queue.remove(place)
        job.places = {}
        del self._waiting[job.future]

    def _lose(self, place: Waiting[_Job[Any]]) -> list[_Job[Any]]:
        """A job has lost one of its places. Returns it if it has no other."""
        job = place.job
        del job.places[place.client]
        if job.places:
            return []
        del self._waiting[job.future]
        return [job]

    def _refusal(self) -> OverloadedError:
        return OverloadedError(
            f"too many {self._what}, and no client has more of them than this one; try again later",
            retry_after_seconds=RETRY_SECONDS,
        )


def _fail(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
