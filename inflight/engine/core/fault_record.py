"""`FaultRecord`: the recoveries of an engine core since its start, for `FaultStatus` and the log."""

from __future__ import annotations

import logging
import time
from collections import Counter

from inflight.errors import RankError, StepError, StepTimeoutError
from inflight.executor.executor import Executor
from inflight.executor.recovery import RecoveryResult
from inflight.interface.statistics import FaultCause, FaultStatus

logger = logging.getLogger(__name__)


class FaultRecord:
    def __init__(self) -> None:
        self._num_recoveries: Counter[str] = Counter()
        self._cause: FaultCause = "step_failed"  # of the recovery under way
        self._last_cause = ""
        self._began_at: float | None = None
        self._last_seconds = 0.0
        self._num_resumed = 0

    def begin(self, cause: RankError) -> None:
        self._began_at = time.monotonic()
        self._last_cause = str(cause).splitlines()[0]
        self._cause = _kind_of(cause)

    def end(self, result: RecoveryResult, num_resumed: int) -> None:
        """`num_resumed`: how many sequences had begun, and go on."""
        assert self._began_at is not None
        self._last_seconds, self._began_at = time.monotonic() - self._began_at, None
        self._num_recoveries["link_broken" if result.cut_off else self._cause] += 1
        self._num_resumed += num_resumed
        new = f"new ranks: {', '.join(map(str, result.replaced))}" if result.replaced else "no rank was replaced"
        logger.warning(
            "the engine has recovered in %.2f s: epoch %d; %s; %d sequences that had begun go on. The fault was: %s",
            self._last_seconds,
            result.epoch,
            new,
            num_resumed,
            self._last_cause,
        )

    def status(self, executor: Executor, *, is_dead: bool) -> FaultStatus:
        return FaultStatus(
            state="failed" if is_dead else "healthy" if self._began_at is None else "recovering",
            epoch=executor.meeting.epoch,
            num_recoveries=dict(self._num_recoveries),
            last_cause=self._last_cause,
            last_kind=self._cause if self._last_cause else "",
            last_recovery_seconds=self._last_seconds,
            num_stale_frames=executor.num_stale_frames,
            num_resumed_requests=self._num_resumed,
            spare_workers=executor.num_spares,
        )


def _kind_of(cause: RankError) -> FaultCause:
    if isinstance(cause, StepTimeoutError):
        return "rank_hung"
    if cause.lost_ranks:  # every rank that failed had only lost other ranks
        return "link_broken"
    return "step_failed" if isinstance(cause, StepError) else "rank_died"
