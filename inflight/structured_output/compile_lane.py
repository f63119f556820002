"""`CompileLane`: a bounded queue of grammar compilations. A few of them run at a time, each on its own thread.

A running compilation cannot be interrupted, because the library offers no way to do so. But it can be written off: it goes on,
but no longer counts as running, so the next compilation may start.

1. If nobody waits for a queued compilation any more, it is cancelled. If nobody waits for a running compilation any more, it is
   written off, unless `num_running` compilations that were written off still run. The next compilation starts SETTLE_SECONDS
   later. If many requests end together, this gives them time to cancel their queued compilations.
2. If a compilation runs for more than `max_seconds`, it fails and is written off.
3. If `max_queued` compilations wait already, a new one is refused.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from inflight.errors import InvalidRequestError, OverloadedError
from inflight.structured_output.backend import CompiledGrammar

RETRY_SECONDS = 1
SETTLE_SECONDS = 0.05  # the time from the write-off of a running compilation to the start of the next one (see 1.)
MAX_CLOSE_SECONDS = 5.0  # the longest time that `close` waits for running compilations


class CompileLane:
    """Any thread may call its methods. A compilation is identified by its future.

    Args:
        num_running: how many compilations may run at a time. Compilations that are written off do not count.
        max_seconds: how long a compilation may run.
    """

    def __init__(self, name: str, *, num_running: int, max_queued: int, max_seconds: float) -> None:
        self._name = name
        self._num_running = num_running
        self._max_queued = max_queued
        self._max_seconds = max_seconds
        self._changed = threading.Condition()  # its lock is reentrant
        self._queue: OrderedDict[Future[CompiledGrammar], Callable[[], CompiledGrammar]] = OrderedDict()
        self._running: set[Future[CompiledGrammar]] = set()
        self._written_off: set[Future[CompiledGrammar]] = set()  # they run, but no longer count as running
        self._is_closed = False

    def submit(self, compile_grammar: Callable[[], CompiledGrammar]) -> Future[CompiledGrammar]:
        """Add a compilation to the queue. Its future gets the grammar, or the exception of `compile_grammar`.

        Raises:
            OverloadedError: too many compilations wait.
        """
        future: Future[CompiledGrammar] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
            elif len(self._queue) >= self._max_queued:
                reason = "too many grammars wait to be compiled; try again later"
                raise OverloadedError(reason, retry_after_seconds=RETRY_SECONDS)
            else:
                self._queue[future] = compile_grammar
                self._start_next()
        return future

    def leave(self, future: Future[CompiledGrammar]) -> None:
        """Call this when nobody waits for the compilation any more."""
        with self._changed:
            if self._queue.pop(future, None) is not None:
                future.cancel()
            elif future in self._running and len(self._written_off) < self._num_running:
                self._write_off(future)
                _call_later(SETTLE_SECONDS, self._start_next)

    def close(self) -> None:
        """Cancel queued compilations, and wait up to MAX_CLOSE_SECONDS for running ones."""
        with self._changed:
            self._is_closed = True
            for future in self._queue:
                future.cancel()
            self._queue.clear()
            self._changed.wait_for(lambda: not self._running and not self._written_off, MAX_CLOSE_SECONDS)

    def _start_next(self) -> None:
        with self._changed:
            while self._queue and len(self._running) < self._num_running:
                job = self._queue.popitem(last=False)
                job[0].set_running_or_notify_cancel()
                self._running.add(job[0])
                threading.Thread(target=self._run, args=job, name=self._name, daemon=True).start()

    def _run(self, future: Future[CompiledGrammar], compile_grammar: Callable[[], CompiledGrammar]) -> None:
        timer = _call_later(self._max_seconds, partial(self._expire, future))
        try:
            end = partial(future.set_result, compile_grammar())
        except BaseException as error:  # includes a panic of a Rust library; only this compilation fails
            end = partial(future.set_exception, error)
        timer.cancel()
        with self._changed:
            self._running.discard(future)
            self._written_off.discard(future)
            if not future.done():
                end()
            self._start_next()
            self._changed.notify_all()

    def _expire(self, future: Future[CompiledGrammar]) -> None:
        with self._changed:
            if not future.done():
                problem = f"the grammar was not compiled within {self._max_seconds:g} s: simplify it"
                future.set_exception(InvalidRequestError(problem))
                self._write_off(future)
                self._start_next()

    def _write_off(self, future: Future[CompiledGrammar]) -> None:
        self._running.discard(future)
        self._written_off.add(future)


def _call_later(seconds: float, function: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer
