"""`GuardedTier`: calls a tier so that no call takes longer than its deadline, whatever the tier does.

Operations run in threads of this object, because a wait for a folder on a dead server, or for a user's class, cannot be ended
in another way. A late operation goes on in its thread, and holds one of the `max_operations` places until it ends; its caller
goes on at once. Reads and writes have a breaker each: a full disk can still be read.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from inflight.kv_connector.breaker import Breaker
from inflight.kv_connector.tier import Tier

logger = logging.getLogger(__name__)

COUNTS = (
    "hits misses errors checksum_failures rejected stored read_bytes written_bytes read_seconds written_seconds".split()
)


class AbandonedError(TimeoutError):
    """The operation was late, or the tier was closed. Its thread may still use the buffer, so the caller must not."""


class _Job:
    """One operation. `is_done` is guarded by the tier's lock; `result` and `error` are set before it."""

    def __init__(self, operation: Callable[[], object]) -> None:
        self.operation = operation
        self.ended = threading.Event()
        self.is_done = False
        self.result: object = None
        self.error: BaseException | None = None


class GuardedTier:
    """
    Args:
        label: how logs name the tier.
        clock: seconds; for the breakers.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        label: str,
        timeout_seconds: float,
        max_operations: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self._tier = tier
        self._timeout_seconds = timeout_seconds
        self._max_operations = max_operations
        self._reads, self._writes = Breaker(clock), Breaker(clock)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # for all below
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._waiting: set[_Job] = set()
        self._num_running = self._num_threads = 0
        self._is_closed = False

    def get(self, name: bytes, into: memoryview, offset: int | None = None) -> int | None:
        """Returns what `Tier.get` returns, or with `offset` what `Tier.get_range` returns; -1 if that is no number; None also
        if the operation failed or was rejected.

        Raises:
            AbandonedError: `into` must not be used any more.
        """
        start = time.perf_counter()
        get = self._tier.get if offset is None else partial(self._tier.get_range, offset=offset)
        is_done, found = self._run(self._reads, lambda: get(name, into))
        if not is_done or found is None:
            self.count(misses=is_done)
            return None
        length = found if type(found) is int else -1
        self.count(read_bytes=min(max(length, 0), len(into)), read_seconds=time.perf_counter() - start)
        return length

    def put(self, name: bytes, data: memoryview) -> bool:
        """Returns whether the tier has the object now.

        Raises:
            AbandonedError: the buffer of `data` must not be written any more.
        """
        start = time.perf_counter()
        is_done, _ = self._run(self._writes, lambda: self._tier.put(name, data))
        if is_done:
            self.count(stored=1, written_bytes=len(data), written_seconds=time.perf_counter() - start)
        return is_done

    def touch(self, name: bytes) -> bool:
        """Returns False if the tier has told that it has no object of this name."""
        with suppress(AbandonedError):
            is_done, has = self._run(self._writes, lambda: self._tier.touch(name))
            return not is_done or has is not False
        return True

    def discard(self, name: bytes) -> None:
        """Removes a damaged object, if the tier can do that now."""
        with suppress(AbandonedError):
            self._run(self._writes, lambda: self._tier.discard(name))

    def count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def take_counts(self) -> dict[str, float]:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    def close(self) -> None:
        """Ends all waits and closes the tier. If it has not closed after `timeout_seconds`, it is left alone."""
        with self._lock:
            self._is_closed = True
            for job in self._waiting:
                job.ended.set()
        closing = threading.Thread(target=self._close_tier, name=f"inflight-{self.label}-close", daemon=True)
        closing.start()
        closing.join(self._timeout_seconds)
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _close_tier(self) -> None:
        try:
            self._tier.close()
        except BaseException as error:
            logger.warning("The KV tier %s did not close: %s", self.label, _describe(error))

    def _run(self, breaker: Breaker, operation: Callable[[], object]) -> tuple[bool, object]:
        """Returns whether the operation succeeded, and its result."""
        job = _Job(operation)
        with self._lock:
            if self._num_threads == self._num_running < self._max_operations and not self._is_closed:
                with suppress(RuntimeError):  # the system has no more threads
                    threading.Thread(target=self._work, name=f"inflight-{self.label}", daemon=True).start()
                    self._num_threads += 1
            is_full = self._is_closed or self._num_threads == self._num_running
            ticket = None if is_full else breaker.enter()
            if ticket is None:
                self._counts["rejected"] += 1
                return False, None
            self._num_running += 1
            self._waiting.add(job)
        self._jobs.put(job)
        job.ended.wait(self._timeout_seconds)
        with self._lock:
            self._waiting.discard(job)
            error = job.error if job.is_done else AbandonedError()
            self._counts["errors"] += error is not None
        if breaker.leave(ticket, error is None):
            state = "works again" if error is None else f"is left out for a while: {_describe(error)}"
            logger.warning("The KV tier %s %s", self.label, state)
        if isinstance(error, AbandonedError):
            raise error
        return error is None, job.result

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.result = job.operation()
            except BaseException as error:  # an extension's panic is no Exception; it must not end this thread
                job.error = error
            with self._lock:
                self._num_running -= 1
                job.is_done = True
            job.ended.set()
            del job  # or this thread would keep its buffer until the next job


def _describe(error: BaseException) -> str:
    """Names the error without a library's text, because that can contain an address with a password."""
    return type(error).__name__ + (f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else "")
