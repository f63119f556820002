"""`GrammarCache`: compiles grammars on a few threads of its own, each once, and keeps the ones used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from inflight.structured_output.backend import CompiledGrammar, GrammarBackend
from inflight.structured_output.spec import GrammarSpec


class GrammarCache:
    """Futures by spec, least recently used first. A failed compilation is kept as well: it would fail again.

    One that is being compiled is never evicted, and what is evicted lives on in the matchers made from it. Any thread may call.
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
        self._futures: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="inflight-grammar")

    def __len__(self) -> int:
        return len(self._futures)

    def get(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The grammar, compiled or on its way; returns at once. The future fails with what `GrammarBackend.compile` raises."""
        with self._lock:
            future = self._futures.get(spec)
            if future is None:
                future = self._futures[spec] = self._threads.submit(self._compile, spec)
            self._futures.move_to_end(spec)
            self._evict()
            return future

    def backend(self) -> GrammarBackend:
        """The backend, made by the first who asks; slow then."""
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._create_backend()
            return self._backend

    def close(self) -> None:
        """Waits for what is being compiled; what has not begun is cancelled."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self.backend().compile(spec)

    def _evict(self) -> None:
        idle = [(spec, _size_bytes(spec, future)) for spec, future in self._futures.items() if future.done()]
        num_bytes = sum(size for _, size in idle)
        for spec, size in idle[:-1] if len(idle) == len(self._futures) else idle:  # never the one asked for
            if len(self._futures) <= self._max_count and num_bytes <= self._max_bytes:
                break
            del self._futures[spec]
            num_bytes -= size


def _size_bytes(spec: GrammarSpec, future: Future[CompiledGrammar]) -> int:
    failed = future.cancelled() or future.exception() is not None
    return len(spec.text) + (0 if failed else future.result().size_bytes)
