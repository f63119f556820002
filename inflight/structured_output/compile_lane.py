"""`CompileLane`: compiles grammars. Those that wait are in a `FairQueue`; the longer a grammar, the more it costs there. A few
compilations run at a time, each on its own thread, which has a lower priority than the engine's.

A running compilation cannot be interrupted, because the library offers no way to do so. But it can be written off: it goes on,
but no longer counts as running, so the next compilation may start.

1. If nobody waits for a queued compilation any more, it is cancelled. If nobody waits for a running compilation any more, it is
   written off, unless `num_running` compilations that were written off still run. The next compilation starts SETTLE_SECONDS
   later. If many requests end together, this gives them time to cancel their queued compilations.
2. If a compilation runs for more than `max_seconds`, it fails and is written off.
3. If `max_queued` compilations wait already, the newest one of the client with the most of them is refused.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from inflight.errors import InvalidRequestError, OverloadedError
from inflight.fair_queue import FairQueue, Waiting
from inflight.structured_output.backend import CompiledGrammar
from inflight.thread_priority import lower_priority

GRAMMAR_COST = 2**12  # what a grammar costs beside its characters: a short text may be as much work as a long one
RETRY_SECONDS = 1
SETTLE_SECONDS = 0.05  # the time from the write-off of a running compilation to the start of the next one (see 1.)
NICENESS = 5  # of the threads: a compilation may take a whole core for seconds
MAX_CLOSE_SECONDS = 5.0  # the longest time that `close` waits for running compilations


@dataclass(eq=False, slots=True)
class _Compilation:
    """`forget`: called if it is refused after it was accepted, before its future fails."""

    compile: Callable[[], CompiledGrammar]
    forget: Callable[[], None]
    future: Future[CompiledGrammar] = field(default_factory=Future)


class CompileLane:
    """Any thread may call its methods. A compilation is identified by its future.

    Args:
        num_running: how many compilations may run at a time. Compilations that are written off do not count.
        max_seconds: how long a compilation may run.
    """

    def __init__(self, name: str, *, num_running: int, max_queued: int, max_seconds: float) -> None:
        self._name = name
        self._num_running = num_running
        self._max_seconds = max_seconds
        self._changed = threading.Condition()  # its lock is reentrant
        self._queue = FairQueue[_Compilation](max_queued)
        self._waiting: dict[Future[CompiledGrammar], Waiting[_Compilation]] = {}  # what is in the queue
        self._running: set[Future[CompiledGrammar]] = set()
        self._written_off: set[Future[CompiledGrammar]] = set()  # they run, but no longer count as running
        self._is_closed = False

    def submit(
        self,
        compile_grammar: Callable[[], CompiledGrammar],
        client: str = "",
        num_characters: int = 0,
        forget: Callable[[], None] = lambda: None,
    ) -> Future[CompiledGrammar]:
        """Add a compilation to the queue. Its future gets the grammar, or the exception of `compile_grammar`; or an
        `OverloadedError`, after a call of `forget`, if another client needs its place.

        Args:
            client: who needs the grammar; clients take turns.
            num_characters: the length of the grammar's text.
            forget: called by the thread that calls `submit` for another compilation.

        Raises:
            OverloadedError: too many compilations wait, and no client has more of them than this one.
        """
        with self._changed:
            if self._is_closed:
                future: Future[CompiledGrammar] = Future()
                future.cancel()
                return future
            if self._queue.is_full_for(client):
                raise _refusal()
            if (refused := self._queue.take_newest()) is not None:
                del self._waiting[refused.job.future]
                refused.job.forget()
                refused.job.future.set_exception(_refusal())
            compilation = _Compilation(compile_grammar, forget)
            self._waiting[compilation.future] = self._queue.add(compilation, client, GRAMMAR_COST + num_characters)
            self._start_next()
        return compilation.future

    def leave(self, future: Future[CompiledGrammar]) -> None:
        """Call this when nobody waits for the compilation any more."""
        with self._changed:
            if (waiting := self._waiting.pop(future, None)) is not None:
                self._queue.remove(waiting)
                future.cancel()
            elif future in self._running and len(self._written_off) < self._num_running:
                self._write_off(future)
                _call_later(SETTLE_SECONDS, self._start_next)

    def close(self) -> None:
        """Cancel queued compilations, and wait up to MAX_CLOSE_SECONDS for running ones."""
        with self._changed:
            self._is_closed = True
            for future, waiting in self._waiting.items():
                self._queue.remove(waiting)
                future.cancel()
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._running and not self._written_off, MAX_CLOSE_SECONDS)

    def _start_next(self) -> None:
        with self._changed:
            while self._waiting and len(self._running) < self._num_running:
                following = self._queue.take_next()
                future = following.job.future
                del self._waiting[future]
                future.set_running_or_notify_cancel()
                self._running.add(future)
                threading.Thread(target=self._run, args=(following,), name=self._name, daemon=True).start()

    def _run(self, taken: Waiting[_Compilation]) -> None:
        lower_priority(NICENESS)
        future = taken.job.future
        timer = _call_later(self._max_seconds, partial(self._expire, future))
        try:
            end = partial(future.set_result, taken.job.compile())
        except BaseException as error:  # includes a panic of a Rust library; only this compilation fails
            end = partial(future.set_exception, error)
        timer.cancel()
        with self._changed:
            self._queue.end(taken)
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


def _refusal() -> OverloadedError:
    return OverloadedError(
        "too many grammars wait to be compiled, and no client has more of them than this one; try again later",
        retry_after_seconds=RETRY_SECONDS,
    )
