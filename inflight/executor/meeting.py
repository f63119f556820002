"""`Meeting`: what the executor knows about its ranks while they begin an epoch. recovery.py explains epochs."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from inflight.errors import EngineClosedError, InflightError
from inflight.executor.failures import start_up_error
from inflight.interface.start_up import EpochReply, Listening, Ready


class Meeting:
    """The ranks come to it in two waves: first every rank says where it listens, then every rank says that it has joined.

    Any thread may call any method.

    Attributes:
        failed: rank -> the error because of which it cannot take part. Such a rank has ended or must
            be replaced. But if the error is an echo (another rank is the cause), the rank stays for the next epoch.
    """

    def __init__(self, epoch: int, num_ranks: int) -> None:
        self.epoch = epoch
        self.failed: dict[int, InflightError] = {}
        self._ranks = frozenset(range(num_ranks))
        self._addresses: dict[int, tuple[str, int]] = {}
        self._ready: set[int] = set()
        self._broken_links: set[tuple[int, int]] = set()
        self._error: InflightError | None = None  # why the whole meeting has failed; None if it has not
        self._changed = threading.Condition()

    # -- news, from the executor's threads -----------------------------------------------------------------------------

    def take(self, reply: EpochReply) -> None:
        match reply:
            case Listening():
                with self._changed:
                    self._addresses[reply.rank] = reply.address
                    self._changed.notify_all()
            case Ready():
                with self._changed:
                    self._ready.add(reply.rank)
                    self._changed.notify_all()
            case _:
                with self._changed:
                    self._broken_links |= {(reply.rank, lost) for lost in reply.failure.lost_ranks}
                self.fail(reply.rank, start_up_error(reply.rank, reply.failure, len(self._ranks)))

    def fail(self, rank: int, error: InflightError) -> None:
        """Note that a rank cannot take part. The first error of a rank is kept."""
        with self._changed:
            self.failed.setdefault(rank, error)
            self._changed.notify_all()

    def expect_again(self, rank: int) -> None:
        """Forget what is known about a rank, because a new process (or thread) takes its place."""
        with self._changed:
            self.failed.pop(rank, None)
            self._addresses.pop(rank, None)
            self._ready.discard(rank)

    def close(self, error: InflightError | None = None) -> None:
        """Let all waits fail with `error`, now and later. By default it says that the executor was shut down."""
        with self._changed:
            reason = error or EngineClosedError("the executor was shut down before its ranks were ready")
            self._error = self._error or reason
            self._changed.notify_all()

    @property
    def broken_links(self) -> frozenset[tuple[int, int]]:
        """Pairs of ranks: one that could not join, and one that it could not reach."""
        with self._changed:
            return frozenset(self._broken_links)

    # -- waits ---------------------------------------------------------------------------------------------------------

    def wait_for_reports(self, ranks: Collection[int], seconds: float) -> set[int]:
        """Wait until each of `ranks` listens or has failed, at most `seconds`. Returns those that failed or do not listen."""

        def missing() -> set[int]:
            return set(ranks) - self._addresses.keys()

        with self._changed:
            self._changed.wait_for(lambda: missing() <= self.failed.keys() or self._error is not None, seconds)
            self._raise_if_closed()
            return missing() | (set(ranks) & self.failed.keys())

    def wait_for_all_replies(self, seconds: float) -> None:
        """Wait until each rank has joined or failed, but at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ranks <= self._ready | self.failed.keys(), seconds)
            self._raise_if_closed()

    def wait_until_all_listen(self, deadline: float | None = None) -> tuple[tuple[str, int], ...]:
        """Returns the address of each rank. `deadline` and errors: as in `wait_until_all_are_ready`."""
        self._wait(self._addresses, deadline, "say where they listen")
        return tuple(self._addresses[rank] for rank in sorted(self._ranks))

    def wait_until_all_are_ready(self, deadline: float | None = None) -> None:
        """Wait until all ranks have joined, but only until `deadline`, a time of `time.monotonic()`.

        Raises:
            InflightError: a rank has failed, or the executor was shut down.
            TimeoutError: ranks have not joined in time.
        """
        self._wait(self._ready, deadline, "meet and load the model")

    def _wait(self, come: Collection[int], deadline: float | None, what: str) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self.failed or self._error is not None or len(come) == len(self._ranks),
                None if deadline is None else max(deadline - time.monotonic(), 0.0),
            )
            self._raise_if_closed()
            for error in self.failed.values():
                raise error
            if missing := sorted(self._ranks - set(come)):
                raise TimeoutError(f"ranks {', '.join(map(str, missing))} did not {what} in time")

    def _raise_if_closed(self) -> None:
        if self._error is not None:
            raise self._error
