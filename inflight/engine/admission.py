"""Decides which requests the engine accepts. `Admission` limits the queue; `Drain` refuses new requests when the engine ends.

The engine reports its state now and then, and `Admission` decides without asking it. It counts the sequences that waited at
the newest report, and the sequences that were sent after it. A report contains the number of sequences that the engine has
received, so no sequence is counted twice or forgotten. If no sequence waited at the report, the next sequences get the free
slots at once, so they do not count as waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.engine.input_processor import ProcessedRequest
from inflight.errors import ConfigError, EngineClosedError, InvalidRequestError, OverloadedError
from inflight.interface.statistics import SchedulerStats

MAX_SEQUENCES = 1024  # the most sequences of requests that are submitted together
MAX_RETRY_SECONDS = 60
RATE_WINDOW = 64  # the rate at which requests end is computed from this number of newest ends


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """The limits of the queue of requests that have not started. None means no limit. Each front end applies them by itself.

    Attributes:
        max_queued_requests: how many sequences may wait. A request with n=4 has four sequences. A sequence that gets a free
            slot does not wait.
        max_queued_tokens: how many prompt tokens may wait. If no sequence waits, a request is accepted even if its prompts are
            longer.
    """

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be an integer of 1 or more; leave it out for no limit")


class Admission:
    def __init__(self, limits: QueueLimits, max_num_seqs: int) -> None:
        self._limits = limits
        self._max_num_seqs = self._free_slots = max_num_seqs
        # requests sent since the newest report: (`_num_sent` after the request, its prompt tokens)
        self._sent: deque[tuple[int, int]] = deque()
        self._num_sent = self._num_received = 0
        self._stats: SchedulerStats | None = None  # the newest report
        # prompt tokens of the sequences that wait or were sent since the report, but have no free slot
        self._num_queued_tokens = 0
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)

    def check(self, num_sequences: int, num_tokens: int) -> None:
        """Check whether `num_sequences` sequences with `num_tokens` prompt tokens may join the queue.

        Raises:
            InvalidRequestError: even an idle engine would not accept this number of sequences.
            OverloadedError: the queue is full.
        """
        tokens, limits = self._num_queued_tokens, self._limits
        most, most_tokens = limits.max_queued_requests, limits.max_queued_tokens
        allowed = MAX_SEQUENCES if most is None else min(MAX_SEQUENCES, self._max_num_seqs + most)
        if num_sequences > allowed:
            raise InvalidRequestError(
                f"{num_sequences} sequences (prompts times n) in one request; at most {allowed} are allowed: lower n, or send "
                "fewer prompts at a time"
            )
        num_waiting = 0 if self._stats is None else self._stats.num_waiting
        # how many sequences wait; a negative number means free slots
        queued = num_waiting + self._num_sent - self._num_received - self._free_slots
        if most is not None and queued + num_sequences > most:
            raise OverloadedError(
                f"the queue is full: {max(queued, 0)} of {most} sequences wait, and this request has {num_sequences}; try "
                "again later",
                retry_after_seconds=self._retry_after(max(queued, 1)),
            )
        if queued > 0 and most_tokens is not None and tokens + num_tokens > most_tokens:
            raise OverloadedError(
                f"the queue is full: {tokens} of {most_tokens} prompt tokens wait, and this request has {num_tokens}; try "
                "again later",
                retry_after_seconds=self._retry_after(queued),
            )

    def sent(self, request: ProcessedRequest) -> None:
        """Count a request that was sent to the engine. Its prompt is computed once for all its sequences."""
        self._num_sent += len(request.children)
        self._sent.append((self._num_sent, len(request.prompt_token_ids)))
        self._num_queued_tokens += self._queued_tokens(*self._sent[-1])

    def reported(self, stats: SchedulerStats, num_received: int) -> None:
        """Process a new report of the engine, which had received `num_received` sequences of this front end by then."""
        self._stats, self._num_received = stats, num_received
        self._free_slots = 0 if stats.num_waiting else self._max_num_seqs - stats.num_running
        while self._sent and self._sent[0][0] <= num_received:
            self._sent.popleft()
        self._num_queued_tokens = stats.num_waiting_tokens + sum(self._queued_tokens(*each) for each in self._sent)

    def ended(self) -> None:
        """Count a request that has ended."""
        self._ends.append(time.monotonic())

    def _queued_tokens(self, num_sent: int, num_tokens: int) -> int:
        """Returns how many prompt tokens a request adds to the queue. `num_sent` is the number of sequences sent up to and
        including this request."""
        return num_tokens if num_sent - self._num_received > self._free_slots else 0

    def _retry_after(self, queued: int) -> int:
        """Returns in how many seconds `queued` sequences will have left the queue, if requests end at the recent rate."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(max(math.ceil(queued / rate), 1), MAX_RETRY_SECONDS)


class Drain:
    """The end of an engine on one event loop. When it `has_begun`, no more requests are accepted. A request that was accepted
    before may still be submitted until the drain ends."""

    def __init__(self) -> None:
        self.has_begun = False
        self._has_ended = False
        self._num_accepted = 0  # accepted requests that are not submitted yet
        self._num_running = 0
        self._has_changed = asyncio.Event()

    def check_new(self) -> None:
        if self.has_begun:
            raise EngineClosedError(_DRAINS)

    def check_submit(self) -> None:
        if self._has_ended or (self.has_begun and not self._num_accepted):
            raise EngineClosedError(_DRAINS)

    @contextlib.contextmanager
    def accepted(self) -> Iterator[None]:
        """A context in which a request is prepared and submitted. The drain waits until the context ends."""
        self._num_accepted += 1
        try:
            yield
        finally:
            self._num_accepted -= 1
            self._has_changed.set()

    def note_running(self, count: int) -> None:
        """Tell the drain that `count` requests were submitted and have not ended."""
        self._num_running = count
        self._has_changed.set()

    async def run(self, timeout: float) -> None:
        """Wait until no request is accepted or running.

        Raises:
            TimeoutError: some requests have not ended after `timeout` seconds.
        """
        self.has_begun = True
        try:
            async with asyncio.timeout(timeout):
                while self._num_accepted or self._num_running:
                    self._has_changed.clear()
                    await self._has_changed.wait()
        finally:
            self._has_ended = True


_DRAINS = "the engine accepts no more requests, because it is about to end"
