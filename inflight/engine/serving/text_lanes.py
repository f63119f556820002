"""`TextLanes`: the threads that tokenise, and the order in which texts get them.

A text waits only for texts of its own size class, because each class (`Lane`) has threads of its own. A text that is being
tokenised cannot be interrupted. The rendering of a chat template ends when nobody waits for it any more (`IS_UNWANTED`).

Within a lane, clients get equal shares (fair queueing, Demers et al. 1989): each text is due when the lane has done its cost
for each client that has texts there. So a client that sends many or long texts waits for its own texts, and among first texts
of clients the shorter ones come first. Every text comes at last, because texts that arrive later are due later.

If too much text waits in a lane, the client with the most waiting text is refused: its newest text, or the text that it
just sends.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from inflight.engine.serving.client import CLIENT
from inflight.errors import EngineClosedError, OverloadedError
from inflight.thread_priority import lower_priority
from inflight.tokenizer.sandbox.budget import IS_UNWANTED

T = TypeVar("T")

# For each lane: the length of its longest texts in characters, and the number of its threads. The last lane has no limit.
LANES = ((2**12, 2), (2**16, 1), (2**20, 1), (None, 1))
NUM_RENDERINGS = 2  # of chat templates at a time
# A refusal comes late, because a client that tries again at once would take as much time as texts do.
REFUSAL_SECONDS = 1.0
NICENESS = 5  # of the threads for all but short texts, which may take whole cores for seconds
# The most characters that may wait in a lane. If no text waits there, a text of any length is accepted.
MAX_WAITING_CHARACTERS = 2**24
CHARACTERS_PER_SECOND = 2**19  # roughly the speed of one thread; tells a refused client when to try again
TEXT_COST = 2**10  # what a text costs beside its characters
BEHIND_COST = 2**20  # what a text costs more if it may wait for the texts of requests


@dataclass(eq=False, slots=True)
class _Job:
    due: float  # a virtual time in characters: see `Lane`
    number: int
    cost: int
    function: Callable[[], Any]
    client: str
    num_characters: int
    future: asyncio.Future[Any]

    def __lt__(self, other: _Job) -> bool:
        return (self.due, self.number) < (other.due, other.number)


class Lane:
    """All methods must be called on one event loop.

    The virtual time of the lane, `_now`, is how many characters it would have done for each client, if it did all clients'
    texts at the same time. A text is due as many characters after `_now`, or after its client's last text is due if that is
    later, as it costs.
    """

    def __init__(self, name: str, num_threads: int, *, niceness: int = 0) -> None:
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix=name, initializer=lower_priority, initargs=(niceness,)
        )
        self._num_threads = self._num_free = num_threads
        self._numbers = itertools.count()
        self._now = 0.0
        self._queue: list[_Job] = []  # a heap
        self._waiting: dict[str, list[_Job]] = {}  # for each client in the order of arrival
        self._due: dict[str, float] = {}  # for each client that has texts here: when its last text is due
        self._num_jobs: dict[str, int] = {}  # for each client: how many texts wait or are tokenised
        self._num_waiting = 0  # characters
        self._is_closed = False

    async def run(self, function: Callable[[], T], num_characters: int, *, behind: bool = False) -> T:
        """Run `function` in a thread, when it is due.

        Raises:
            OverloadedError: too much text waits, and this client has the most of it, now or later while this text waits.
        """
        client = CLIENT.get()
        if not self._makes_room(client, num_characters):
            await asyncio.sleep(REFUSAL_SECONDS)
            raise self._refusal()
        cost = num_characters + TEXT_COST + behind * BEHIND_COST
        due = max(self._now, self._due.get(client, 0.0)) + cost
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(due, next(self._numbers), cost, function, client, num_characters, future)
        self._due[client] = due
        self._num_jobs[client] = self._num_jobs.get(client, 0) + 1
        self._waiting.setdefault(client, []).append(job)
        self._num_waiting += num_characters
        heapq.heappush(self._queue, job)
        self._start_next()
        try:
            return await future
        finally:
            if job in self._waiting.get(client, ()):  # the caller was cancelled before the text had a thread
                self._leave_queue(job)
                self._forget(job)

    def close(self) -> None:
        self._is_closed = True
        for job in self._queue:
            if not job.future.done():
                job.future.set_exception(_closed())
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        while self._num_free and self._queue:
            job = heapq.heappop(self._queue)
            if job.future.done():  # cancelled or refused
                continue
            self._leave_queue(job)
            self._now += job.cost / len(self._num_jobs)
            self._num_free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._run, job)
            running.add_done_callback(partial(self._end, job))

    def _end(self, job: _Job, done: asyncio.Future[Any]) -> None:
        self._num_free += 1
        self._forget(job)
        error = None if done.cancelled() else done.exception()
        if not job.future.done():
            if done.cancelled():
                job.future.cancel()
            elif error is not None:
                job.future.set_exception(_closed() if self._is_closed else error)
            else:
                job.future.set_result(done.result())
        self._start_next()

    def _run(self, job: _Job) -> Any:  # Any: whatever the job's function returns
        """In a thread."""
        earlier = IS_UNWANTED.set(lambda: self._is_closed or job.future.done())
        try:
            return job.function()
        finally:  # or the thread would keep this lane for ever, and the lane its threads
            IS_UNWANTED.reset(earlier)

    def _makes_room(self, client: str, num_characters: int) -> bool:
        """Refuse texts of other clients until `num_characters` more may wait. Returns False if this client's are the most."""
        while num_characters and self._num_waiting and self._num_waiting + num_characters > MAX_WAITING_CHARACTERS:
            held = {each: sum(job.num_characters for job in jobs) for each, jobs in self._waiting.items()}
            most = max(held, key=lambda each: held[each])
            if held.get(client, 0) + num_characters >= held[most]:
                return False
            job = self._waiting[most][-1]
            job.future.set_exception(self._refusal())
            self._leave_queue(job)
            self._forget(job)
        return True

    def _refusal(self) -> OverloadedError:
        seconds = max(self._num_waiting // CHARACTERS_PER_SECOND // self._num_threads, 1)
        return OverloadedError(
            f"{self._num_waiting} characters of text wait to be tokenised, and the most of them are this client's; try again "
            "later",
            retry_after_seconds=seconds,
        )

    def _leave_queue(self, job: _Job) -> None:
        jobs = self._waiting[job.client]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.client]
        self._num_waiting -= job.num_characters

    def _forget(self, job: _Job) -> None:
        job.function = _nothing  # a refused or cancelled job stays in the queue until it is due, without its text
        self._num_jobs[job.client] -= 1
        if not self._num_jobs[job.client]:
            del self._num_jobs[job.client], self._due[job.client]


class TextLanes:
    """`check`: called first by each `run`. It raises an error if texts may not be tokenised here."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._lanes = [
            Lane(f"inflight-text-{i}", num_threads, niceness=NICENESS if i else 0)
            for i, (_, num_threads) in enumerate(LANES)
        ]
        self._renderings = Lane("inflight-rendering", NUM_RENDERINGS)
        self._is_closed = False

    async def render(self, function: Callable[[], T]) -> T:
        """Run `function`, which renders a chat template, in a thread for that: a text never waits for a rendering.

        Raises:
            EngineClosedError: `close` was called.
        """
        self._check_open()
        return await self._renderings.run(function, 0)

    async def run(self, function: Callable[[], T], num_characters: int = 0, *, behind: bool = False) -> T:
        """Run `function` in a thread.

        Args:
            num_characters: the length of the text that it tokenises; 0 if it tokenises none.
            behind: whether it may wait for the texts of requests, because no request of the engine needs it.

        Raises:
            OverloadedError: see `Lane.run`.
            EngineClosedError: `close` was called.
        """
        self._check_open()
        lane = next(
            lane
            for lane, (longest, _) in zip(self._lanes, LANES, strict=True)
            if longest is None or num_characters <= longest
        )
        return await lane.run(function, num_characters, behind=behind)

    def close(self) -> None:
        """Refuse texts that wait and those that come. Threads that tokenise go on."""
        self._is_closed = True
        for lane in (*self._lanes, self._renderings):
            lane.close()

    def _check_open(self) -> None:
        self._check()
        if self._is_closed:
            raise EngineClosedError("the engine was closed; make a new one")


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed while this text waited")


def _nothing() -> None:
    pass
