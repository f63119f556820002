"""`GrammarCache`: compiles grammars on threads of their own, and keeps the most recently used ones. Requests with the same
grammar share one compilation.

A compilation needs a millisecond to several seconds. The time grows about with the square of the length of the grammar's text.
So grammars with a long text have a queue of their own (`CompileLane`), and grammars with a short text never wait for them.
In a queue, clients take turns.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from inflight.errors import InflightError, InvalidRequestError
from inflight.structured_output.backend import TOO_COMPLEX, CompiledGrammar, GrammarBackend
from inflight.structured_output.compile_lane import CompileLane
from inflight.structured_output.spec import GrammarSpec

logger = logging.getLogger(__name__)

LONG_TEXT = 2**14  # characters
MAX_QUEUED_SHORT, MAX_QUEUED_LONG = 1024, 64  # 64 of the longest texts need 64 MB
MAX_COMPILE_SECONDS = 30.0


@dataclass(slots=True)
class _Entry:
    """One grammar.

    Attributes:
        num_users: how many requests have called `get` for this grammar, but not yet `release`.
        num_bytes: how many bytes of the cache the entry takes: the length of its text, and the size of the compiled grammar if
            the compilation succeeded. None until the compilation has ended.
    """

    lane: CompileLane
    future: Future[CompiledGrammar]
    num_users: int = 0
    num_bytes: int | None = None


class GrammarCache:
    """Compiled grammars by spec. A failed compilation is kept as well, because it would fail again.

    A grammar that is being compiled is never evicted. Matchers of an evicted grammar stay valid. Any thread may call the
    methods.

    Args:
        num_threads: how many compilations run at a time in each of the two queues.
    """

    def __init__(
        self, create_backend: Callable[[], GrammarBackend], *, num_threads: int, max_count: int, max_bytes: int
    ) -> None:
        self._create_backend = create_backend
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._backend_lock = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._short, self._long = (
            CompileLane(
                f"inflight-grammar-{name}",
                num_running=num_threads,
                max_queued=max_queued,
                max_seconds=MAX_COMPILE_SECONDS,
            )
            for name, max_queued in (("short", MAX_QUEUED_SHORT), ("long", MAX_QUEUED_LONG))
        )

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, spec: GrammarSpec, client: str = "") -> Future[CompiledGrammar]:
        """Returns the future of the compiled grammar at once. The caller must call `release` once.

        The future can fail with any error that `GrammarBackend.compile` raises, with an `InvalidRequestError` if the
        compilation needs too much time, or with an `OverloadedError` if another client needs its place in the queue.

        Args:
            client: who needs it. Clients take turns in a queue (`FairQueue`).

        Raises:
            OverloadedError: too many grammars wait, and no client has more of them than this one. `release` must not be called.
        """
        with self._lock:
            entry = self._entries.get(spec)
            if entry is None:
                lane = self._short if len(spec.text) <= LONG_TEXT else self._long
                compile_grammar, forget = partial(self._compile, spec), partial(self._forget, spec)
                future = lane.submit(compile_grammar, client, len(spec.text), forget)
                entry = self._entries[spec] = _Entry(lane, future)
            entry.num_users += 1
            self._entries.move_to_end(spec)
            return entry.future

    def release(self, spec: GrammarSpec, future: Future[CompiledGrammar]) -> None:
        """Call this when a request no longer needs the result of `get`. If no other request waits for the compilation, it is
        not needed either: `CompileLane.leave` says what happens to it."""
        with self._lock:
            entry = self._entries.get(spec)
            if entry is None or entry.future is not future:  # the grammar was evicted
                return
            entry.num_users -= 1
            if entry.num_users > 0 or entry.future.done():
                return
            entry.lane.leave(entry.future)
            if entry.future.cancelled():
                del self._entries[spec]

    def backend(self) -> GrammarBackend:
        """Returns the backend. The first call is slow, because it makes the backend."""
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._create_backend()
            return self._backend

    def close(self) -> None:
        """Cancel queued compilations, and wait some seconds for running ones."""
        self._short.close()
        self._long.close()

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar, record its size, and evict others if the cache is full now. This thread frees the evicted
        grammars, because that takes a millisecond, which the engine should not lose. Runs in a thread of a `CompileLane`,
        without the lane's lock."""
        num_bytes = len(spec.text)
        try:
            backend = self.backend()
            try:
                grammar = backend.compile(spec)
            except InflightError:
                raise
            except BaseException as error:  # a panic of a Rust library is no `Exception`; its text goes only to the log
                logger.error("the grammar library failed while it compiled a grammar", exc_info=error)
                raise InvalidRequestError(f"{spec.subject}: {TOO_COMPLEX}", spec.subject) from error
            num_bytes += grammar.size_bytes
            return grammar
        finally:
            with self._lock:
                self._entries[spec].num_bytes = num_bytes
                self._num_bytes += num_bytes
                evicted = self._evict(spec)
            del evicted  # frees the grammars, without the lock

    def _forget(self, spec: GrammarSpec) -> None:
        """Removes a grammar that has lost its place in the queue, so that a later `get` tries again. A `get` for another
        grammar calls this, and holds the lock."""
        del self._entries[spec]

    def _evict(self, wanted: GrammarSpec) -> list[_Entry]:
        """Forget the least recently used grammars until the cache is within its limits, but keep the grammar `wanted`. The
        caller holds the lock. Returns what was forgotten."""
        evicted: list[_Entry] = []
        for spec, entry in list(self._entries.items()) if self._is_full() else ():
            if entry.num_bytes is not None and spec != wanted:
                self._num_bytes -= entry.num_bytes
                evicted.append(self._entries.pop(spec))
            if not self._is_full():
                break
        return evicted

    def _is_full(self) -> bool:
        return len(self._entries) > self._max_count or self._num_bytes > self._max_bytes
