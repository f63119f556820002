"""`FaultRecord`: the recoveries of an engine core since its start, for `FaultStatus` and the log."""

import logging
import time
from dataclasses import replace

from inflight.errors import RankError, StepError, StepTimeoutError
from inflight.executor.executor import Executor
from inflight.executor.recovery import RecoveryResult
from inflight.interface.statistics import FaultCause, FaultStatus

logger = logging.getLogger(__name__)


class FaultRecord:
    def __init__(self) -> None:
        self._status = FaultStatus()
        self._began_at = 0.0  # when the last recovery began

    def begin(self, cause: RankError) -> None:
        self._began_at = time.monotonic()
        line = str(cause).splitlines()[0]
        self._status = replace(self._status, state="recovering", last_cause=line, last_kind=_kind_of(cause))

    def end(self, result: RecoveryResult, num_resumed: int) -> None:
        """`num_resumed`: how many sequences had begun, and go on."""
        status = self._status
        seconds = time.monotonic() - self._began_at
        assert status.state == "recovering"
        kind = "link_broken" if result.cut_off else status.last_kind
        self._status = replace(
            status,
            state="healthy",
            num_recoveries=status.num_recoveries | {kind: status.num_recoveries.get(kind, 0) + 1},
            last_recovery_seconds=seconds,
            num_resumed_requests=status.num_resumed_requests + num_resumed,
        )
        new = f"new ranks: {', '.join(map(str, result.replaced))}" if result.replaced else "no rank was replaced"
        logger.warning(
            "the engine has recovered in %.2f s: epoch %d; %s; %d sequences that had begun go on. The fault was: %s",
            seconds,
            result.epoch,
            new,
            num_resumed,
            status.last_cause,
        )

    def status(self, executor: Executor, *, is_dead: bool) -> FaultStatus:
        return replace(
            self._status,
            state="failed" if is_dead else self._status.state,
            epoch=executor.meeting.epoch,
            num_stale_frames=executor.num_stale_frames,
            spare_workers=executor.num_spares,
        )


def _kind_of(cause: RankError) -> FaultCause:
    if isinstance(cause, StepTimeoutError):
        return "rank_hung"
    if cause.lost_ranks:  # every rank that failed had only lost other ranks
        return "link_broken"
    return "step_failed" if isinstance(cause, StepError) else "rank_died"
