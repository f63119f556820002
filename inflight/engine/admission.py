"""Which requests the engine accepts: `Admission` bounds the queue in front of it, `Drain` closes it before the engine ends.

`Admission` needs no answer from the engine. It counts the sequences that waited at the engine's newest report, and the
sequences that were sent after this report. A report gives the number of sequences that the engine had received by then, so no
sequence is counted twice or forgotten. If no sequence waited at the report, the next sequences get the free slots at once.
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

MAX_SEQUENCES = 1024  # the most sequences, over all requests that are submitted together
MAX_RETRY_SECONDS = 60
RATE_WINDOW = 64  # the rate is computed from the ends of so many requests, the newest ones


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """The bounds of the queue before the first step; None means no bound. Each front end counts what the engine reports to it.

    Attributes:
        max_queued_requests: how many sequences may wait; a request with n=4 has four. A sequence that gets a free slot does
            not wait.
        max_queued_tokens: how many prompt tokens may wait. While no sequence waits, a request is accepted whatever the length
            of its prompts.
    """

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is not an integer of 1 or more; leave it out for no bound")


class Admission:
    def __init__(self, limits: QueueLimits, max_num_seqs: int) -> None:
        self._limits = limits
        self._max_num_seqs = self._free_slots = max_num_seqs
        self._sent: deque[tuple[int, int]] = deque()  # since the newest report: (`_num_sent` after it, prompt tokens)
        self._num_sent = self._num_received = 0
        self._stats: SchedulerStats | None = None  # the newest report
        self._num_queued_tokens = 0  # of the sequences that wait or were sent since, except those with a free slot
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)

    def check(self, num_sequences: int, num_tokens: int) -> None:
        """Check that `num_sequences` sequences with `num_tokens` prompt tokens may join the queue.

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
        # negative if slots are free
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
        """Note that a request was sent to the engine. Its prompt is computed once for all of its sequences."""
        self._num_sent += len(request.children)
        self._sent.append((self._num_sent, len(request.prompt_token_ids)))
        self._num_queued_tokens += self._queued_tokens(*self._sent[-1])

    def reported(self, stats: SchedulerStats, num_received: int) -> None:
        """Note the engine's report. It had received `num_received` sequences of this front end when it made the report."""
        self._stats, self._num_received = stats, num_received
        self._free_slots = 0 if stats.num_waiting else self._max_num_seqs - stats.num_running
        while self._sent and self._sent[0][0] <= num_received:
            self._sent.popleft()
        self._num_queued_tokens = stats.num_waiting_tokens + sum(self._queued_tokens(*each) for each in self._sent)

    def ended(self) -> None:
        """Note that a request has ended."""
        self._ends.append(time.monotonic())

    def _queued_tokens(self, num_sent: int, num_tokens: int) -> int:
        """Returns how many prompt tokens a request adds to the queue. `num_sent` counts all sequences up to this request's
        last."""
        return num_tokens if num_sent - self._num_received > self._free_slots else 0

    def _retry_after(self, queued: int) -> int:
        """Returns the seconds until the `queued` sequences have left the queue, if requests end at the recent rate."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(max(math.ceil(queued / rate), 1), MAX_RETRY_SECONDS)


class Drain:
    """The end of an engine on one event loop. Once it `has_begun`, no request is accepted; one that was accepted before may
    still be submitted until the drain ends."""

    def __init__(self) -> None:
        self.has_begun = False
        self._has_ended = False
        self._num_accepted = 0  # not submitted yet
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
        """A context in which a request is made ready. The drain waits for the end of the context."""
        self._num_accepted += 1
        try:
            yield
        finally:
            self._num_accepted -= 1
            self._has_changed.set()

    def note_running(self, count: int) -> None:
        """Note that `count` requests were submitted and have not ended."""
        self._num_running = count
        self._has_changed.set()

    async def run(self, timeout: float) -> None:
        """Wait until no request is accepted or running.

        Raises:
            TimeoutError: after `timeout` seconds some requests have not ended.
        """
        self.has_begun = True
        try:
            async with asyncio.timeout(timeout):
                while self._num_accepted or self._num_running:
                    self._has_changed.clear()
                    await self._has_changed.wait()
        finally:
            self._has_ended = True


_DRAINS = "the engine takes no more requests: it is about to end"
