"""Decides which requests the engine accepts. `Admission` limits the queue. `Drain` refuses new requests during a shutdown.

`Admission` never asks the engine. It uses the engine's newest report. A report says how many sequences waited when it was made,
and how many sequences the engine had received from this front end by then. `Admission` adds the sequences that this front end
has sent and the engine had not received. So no sequence is counted twice or forgotten.

`Admission.load`, which `Router` compares, counts in the same way. It is the work that the engine still has to do.

A running sequence has one of the `max_num_seqs` slots. If no sequence waited when the report was made, the next sequences get
the free slots at once, so they do not count as waiting.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.engine.serving.client import CLIENT, Shares
from inflight.engine.serving.output_lengths import OutputLengths
from inflight.errors import ConfigError, EngineClosedError, InvalidRequestError, OverloadedError
from inflight.interface.statistics import SchedulerStats

MAX_RETRY_SECONDS = 60
RATE_WINDOW = 64  # `Admission` measures at which rate requests end, over at most this many of the last requests


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Limits for the sequences that wait for a slot. None means no limit. If several front ends (API processes) share one
    engine, each one checks these limits without knowing what the others have sent.

    Attributes:
        max_queued_requests: how many sequences may wait. A request with n=4 has four sequences. A sequence that gets a free
            slot does not wait.
        max_call_sequences: how many sequences (prompts times n) one call may submit. A server has such a limit, so that one
            request of a client is not the work of an hour. A program that has the engine to itself has none.
        max_queued_tokens: how many prompt tokens may wait. If no sequence waits, a request of any length is accepted.
    """

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_call_sequences: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_tokens", "max_call_sequences"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be an integer of 1 or more; leave it out for no limit")


class Admission:
    """
    Attributes:
        lengths: how many tokens sequences are expected to have. All engines of a front end share it.
        shares: how many sequences each client has. All engines of a front end share it.
    """

    def __init__(
        self, limits: QueueLimits, max_num_seqs: int, lengths: OutputLengths | None = None, shares: Shares | None = None
    ) -> None:
        self.lengths = lengths or OutputLengths()
        self.shares = shares or Shares()
        self._limits = limits
        self._max_num_seqs = self._free_slots = max_num_seqs
        # for each request that the engine had not received completely when it made the newest report:
        # (`_num_sent` just after the request was sent, the number of its prompt tokens, its work)
        self._sent: deque[tuple[int, int, int]] = deque()
        self._num_sent = self._num_received = 0
        self._stats: SchedulerStats | None = None  # the newest report
        # prompt tokens of all sequences without a slot: of those that waited in the newest report, and of those in `_sent`
        self._num_queued_tokens = 0
        self._sent_work = 0  # of all requests in `_sent`
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)  # when requests ended, as times of `time.monotonic()`

    def check(self, num_sequences: int, num_tokens: int) -> None:
        """Check whether `num_sequences` sequences with `num_tokens` prompt tokens of the present client may join the queue.
        `Shares` says which part of the queue is kept for other clients.

        Raises:
            InvalidRequestError: even an idle engine would not accept this number of sequences.
            OverloadedError: the queue is full.
        """
        tokens, limits = self._num_queued_tokens, self._limits
        most, most_tokens = limits.max_queued_requests, limits.max_queued_tokens
        allowed: float = math.inf if limits.max_call_sequences is None else limits.max_call_sequences
        allowed = allowed if most is None else min(allowed, self._max_num_seqs + most)
        if num_sequences > allowed:
            raise InvalidRequestError(
                f"{num_sequences} sequences (prompts times n) in one request; at most {allowed} are allowed: lower n, or send "
                "fewer prompts at a time"
            )
        client = CLIENT.get()
        most = None if most is None else self.shares.most(client, most)
        most_tokens = None if most_tokens is None else self.shares.most(client, most_tokens)
        is_less = (most, most_tokens) != (limits.max_queued_requests, limits.max_queued_tokens)
        kept = " of this client, which has more than half of all" if is_less else ""
        num_waiting = 0 if self._stats is None else self._stats.num_waiting
        # how many sequences wait; if negative, how many slots are free
        queued = num_waiting + self._num_sent - self._num_received - self._free_slots
        if most is not None and queued + num_sequences > most:
            raise OverloadedError(
                f"the queue has no room: {max(queued, 0)} sequences wait, at most {most} may wait{kept}, and this request "
                f"would add {num_sequences}; try again later",
                retry_after_seconds=self._retry_after(max(queued, 1)),
            )
        if queued > 0 and most_tokens is not None and tokens + num_tokens > most_tokens:
            raise OverloadedError(
                f"the queue has no room: {tokens} prompt tokens wait, at most {most_tokens} may wait{kept}, and this "
                f"request would add {num_tokens}; try again later",
                retry_after_seconds=self._retry_after(queued),
            )

    @property
    def load(self) -> int:
        """Tokens that the engine has to compute: those of prompts that wait or are computed in part, and for each sequence
        those that it is expected to draw."""
        reported = 0
        if (stats := self._stats) is not None:
            sequences = stats.num_waiting + stats.num_running
            reported = stats.num_waiting_tokens + stats.num_running_tokens + int(self.lengths.mean * sequences)
        return reported + self._sent_work

    def sent(self, num_sequences: int, num_tokens: int, work: int = 0) -> None:
        """Count a request that was sent to the engine. Its prompt tokens count once, because all its sequences share them.
        `work`: the tokens of prompt and sequences that the engine has to compute."""
        self._num_sent += num_sequences
        self._sent.append((self._num_sent, num_tokens, work))
        self._sent_work += work
        self._num_queued_tokens += self._queued_tokens(self._num_sent, num_tokens)

    def restarted(self) -> None:
        """Count from zero again: the engine was lost with its queue, and the new engine has received nothing yet."""
        self._sent.clear()
        self._num_sent = self._num_received = self._num_queued_tokens = self._sent_work = 0
        self._stats = None
        self._free_slots = self._max_num_seqs

    def reported(self, stats: SchedulerStats, num_received: int) -> None:
        """Process a new report. When the engine made it, it had received `num_received` sequences of this front end."""
        self._stats = stats
        self._num_received = num_received
        self._free_slots = 0 if stats.num_waiting else self._max_num_seqs - stats.num_running
        while self._sent and self._sent[0][0] <= num_received:
            self._sent_work -= self._sent.popleft()[2]
        queued = sum(self._queued_tokens(num_sent, num_tokens) for num_sent, num_tokens, _ in self._sent)
        self._num_queued_tokens = stats.num_waiting_tokens + queued

    def ended(self) -> None:
        """Count a request that has ended."""
        self._ends.append(time.monotonic())

    def _queued_tokens(self, num_sent: int, num_tokens: int) -> int:
        """Returns how many prompt tokens a request adds to the queue: 0 if its last sequence gets a slot. `num_sent` is
        `_num_sent` just after this request was sent."""
        if num_sent - self._num_received > self._free_slots:
            return num_tokens
        return 0

    def _retry_after(self, queued: int) -> int:
        """Returns in how many seconds `queued` sequences will have left the queue, if requests end at the recent rate.
        The result is from 1 to MAX_RETRY_SECONDS."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)
        return min(max(math.ceil(queued / rate), 1), MAX_RETRY_SECONDS)


class Drain:
    """The first part of a shutdown: refuses new requests, and waits until the submitted requests have ended. A request whose
    `accepted` context began before `run` may still be submitted. All methods must be called on the same event loop."""

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

    def record_running(self, count: int) -> None:
        """Tell the drain that `count` requests were submitted and have not ended."""
        self._num_running = count
        self._has_changed.set()

    async def run(self, timeout: float) -> None:
        """Wait until every accepted request has been submitted and every submitted request has ended.

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


_DRAINS = "the engine is shutting down and accepts no more requests"
