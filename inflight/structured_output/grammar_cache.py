"""`GrammarCache`: compiles grammars off the engine's loop, each once, and keeps the ones used last.

A compilation takes from a millisecond to seconds: its time grows about with the square of the length of its text. So long texts
have a lane of their own, and short ones never wait for them. See `CompileLane` for the bounds of each lane.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from inflight.errors import OverloadedError
from inflight.structured_output.backend import CompiledGrammar, GrammarBackend
from inflight.structured_output.compile_lane import CompileJob, CompileLane
from inflight.structured_output.spec import GrammarSpec

LONG_TEXT = 2**14  # characters
MAX_QUEUED_SHORT, MAX_QUEUED_LONG = 1024, 64  # 64 of the longest texts take 64 MB
MAX_COMPILE_SECONDS = 30.0


@dataclass(slots=True)
class _Entry:
    """`num_users`: requests that have called `get` for it and not yet `release`."""

    lane: CompileLane
    job: CompileJob
    num_users: int = 0


class GrammarCache:
    """Compilations by spec, least recently used first. A failed compilation is kept as well, because it would fail again.

    One that is being compiled is never evicted, and what is evicted lives on in the matchers made from it. Any thread may call.

    Args:
        num_threads: compilations that run at a time, in each of the two lanes.
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
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
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

    def get(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The grammar, compiled or being compiled. Returns at once. The caller must call `release` once.

        The future fails with what `GrammarBackend.compile` raises, with an `OverloadedError` if too many grammars wait, or with
        an `InvalidRequestError` if this one takes too long.
        """
        with self._lock:
            entry = self._entries.get(spec)
            if entry is None:
                lane = self._short if len(spec.text) <= LONG_TEXT else self._long
                try:
                    entry = self._entries[spec] = _Entry(lane, lane.submit(partial(self._compile, spec)))
                except OverloadedError as error:
                    refused: Future[CompiledGrammar] = Future()
                    refused.set_exception(error)
                    return refused
            entry.num_users += 1
            self._entries.move_to_end(spec)
            self._evict()
            return entry.job.future

    def release(self, spec: GrammarSpec, future: Future[CompiledGrammar]) -> None:
        """To be called when a request no longer needs what `get` returned. A compilation that no request waits for is
        cancelled; if it runs already, it is written off (`CompileLane`)."""
        with self._lock:
            entry = self._entries.get(spec)
            if entry is None or entry.job.future is not future:  # it was refused, or evicted meanwhile
                return
            entry.num_users -= 1
            if entry.num_users > 0 or entry.job.future.done():
                return
            entry.lane.leave(entry.job)
            if entry.job.future.cancelled():
                del self._entries[spec]

    def backend(self) -> GrammarBackend:
        """The backend, made by the first who asks; slow then."""
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._create_backend()
            return self._backend

    def close(self) -> None:
        """Cancel queued compilations, and wait some seconds for running ones."""
        self._short.close()
        self._long.close()

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self.backend().compile(spec)

    def _evict(self) -> None:
        idle = [(spec, entry.job.future) for spec, entry in self._entries.items() if entry.job.future.done()]
        sizes = [(spec, _size_bytes(spec, future)) for spec, future in idle]
        num_bytes = sum(size for _, size in sizes)
        for spec, size in sizes[:-1] if len(sizes) == len(self._entries) else sizes:  # never evict the newest one
            if len(self._entries) <= self._max_count and num_bytes <= self._max_bytes:
                break
            del self._entries[spec]
            num_bytes -= size


def _size_bytes(spec: GrammarSpec, future: Future[CompiledGrammar]) -> int:
    failed = future.cancelled() or future.exception() is not None
    return len(spec.text) + (0 if failed else future.result().size_bytes)
