"""`CompileLane`: a bounded queue of compilations, a few of which run at a time, each on a thread of its own.

A running compilation cannot be interrupted, because the libraries offer no way to do so. So another job gets its place:

1. If nobody waits for a job any more, it is cancelled while it is queued. If it runs already, it is written off: it goes on,
   but no longer counts as running. The next job starts SETTLE_SECONDS later, so that requests which end together can
   all release their jobs first. At most `num_running` jobs are written off in this way at a time.
2. A job that runs for more than `max_seconds` fails and is written off.
3. A job that arrives while `max_queued` others wait is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from inflight.errors import InvalidRequestError, OverloadedError
from inflight.structured_output.backend import CompiledGrammar

TOO_MANY_GRAMMARS = "too many grammars wait to be compiled; try again later"  # the front end looks for it
RETRY_SECONDS = 1

SETTLE_SECONDS = 0.05  # from the moment when nobody waits for a running job to the start of the next job
MAX_CLOSE_SECONDS = 5.0  # that `close` waits for running jobs


class JobState(Enum):
    QUEUED = auto()
    RUNNING = auto()
    WRITTEN_OFF = auto()  # it runs, but no longer counts as running
    ENDED = auto()


@dataclass(eq=False, slots=True)
class CompileJob:
    """One compilation. `future` gets the grammar, or the exception of `compile_grammar`."""

    compile_grammar: Callable[[], CompiledGrammar]
    future: Future[CompiledGrammar] = field(default_factory=Future)
    state: JobState = JobState.QUEUED


class CompileLane:
    """Any thread may call.

    Args:
        num_running: jobs that run at a time; jobs that are written off do not count.
        max_seconds: how long a job may run.
    """

    def __init__(self, name: str, *, num_running: int, max_queued: int, max_seconds: float) -> None:
        self._name = name
        self._num_running = num_running
        self._max_queued = max_queued
        self._max_seconds = max_seconds
        self._changed = threading.Condition()
        self._queue: deque[CompileJob] = deque()
        self._on_threads: set[CompileJob] = set()
        self._is_closed = False

    def submit(self, compile_grammar: Callable[[], CompiledGrammar]) -> CompileJob:
        """
        Raises:
            OverloadedError: too many jobs wait.
        """
        job = CompileJob(compile_grammar)
        with self._changed:
            if self._is_closed:
                job.future.cancel()
            elif len(self._queue) >= self._max_queued:
                raise OverloadedError(TOO_MANY_GRAMMARS, retry_after_seconds=RETRY_SECONDS)
            else:
                self._queue.append(job)
                self._start_jobs()
        return job

    def leave(self, job: CompileJob) -> None:
        """To be called when nobody waits for the job any more."""
        with self._changed:
            if job.state is JobState.QUEUED and job in self._queue:
                self._queue.remove(job)
                job.state = JobState.ENDED
                job.future.cancel()
            elif job.state is JobState.RUNNING and self._count(JobState.WRITTEN_OFF) < self._num_running:
                job.state = JobState.WRITTEN_OFF
                _call_later(SETTLE_SECONDS, self._fill_places)

    def close(self) -> None:
        """Cancel queued jobs, and wait up to MAX_CLOSE_SECONDS for running ones."""
        with self._changed:
            self._is_closed = True
            for job in self._queue:
                job.future.cancel()
            self._queue.clear()
            self._changed.wait_for(lambda: not self._on_threads, MAX_CLOSE_SECONDS)

    def _fill_places(self) -> None:
        with self._changed:
            self._start_jobs()

    def _start_jobs(self) -> None:
        """The caller holds the lock."""
        while self._queue and self._count(JobState.RUNNING) < self._num_running:
            job = self._queue.popleft()
            job.future.set_running_or_notify_cancel()
            job.state = JobState.RUNNING
            self._on_threads.add(job)
            threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True).start()

    def _count(self, state: JobState) -> int:
        return sum(job.state is state for job in self._on_threads)

    def _run(self, job: CompileJob) -> None:
        timer = _call_later(self._max_seconds, partial(self._expire, job))
        grammar: CompiledGrammar | None = None
        error: BaseException | None = None
        try:
            grammar = job.compile_grammar()
        except BaseException as raised:  # even a panic of the library: it concerns this job only
            error = raised
        timer.cancel()
        with self._changed:
            job.state = JobState.ENDED
            self._on_threads.remove(job)
            if not job.future.done():
                if grammar is not None:
                    job.future.set_result(grammar)
                else:
                    job.future.set_exception(error)
            self._start_jobs()
            self._changed.notify_all()

    def _expire(self, job: CompileJob) -> None:
        with self._changed:
            if job.future.done():
                return
            job.future.set_exception(
                InvalidRequestError(f"the grammar was not compiled within {self._max_seconds:g} s: simplify it")
            )
            job.state = JobState.WRITTEN_OFF
            self._start_jobs()


def _call_later(seconds: float, function: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer
