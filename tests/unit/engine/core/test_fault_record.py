"""`FaultRecord`: what is counted of each recovery, and what the status says meanwhile."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import cast

import pytest

from inflight.engine.core.fault_record import FaultRecord
from inflight.errors import RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.executor.executor import Executor
from inflight.executor.recovery import RecoveryResult

EXECUTOR = cast("Executor", SimpleNamespace(meeting=SimpleNamespace(epoch=7), num_stale_frames=5, num_spares=2))


@pytest.mark.parametrize(
    ("cause", "replaced", "cut_off", "kind"),
    [
        (StepError("x", rank=0), (), (), "step_failed"),
        (StepTimeoutError("x", rank=0), (0,), (), "rank_hung"),
        (WorkerDiedError("x", rank=0), (0,), (), "rank_died"),
        (RankError("x", rank=0), (0,), (), "rank_died"),
        (StepError("x", rank=0, lost_ranks=(1,)), (), (), "link_broken"),  # the rank only could not reach another one
        (StepTimeoutError("x", rank=0, lost_ranks=(1,)), (0,), (), "rank_hung"),
        (WorkerDiedError("x", rank=0), (0, 1), (1,), "link_broken"),  # found during the recovery
    ],
)
def test_a_recovery_is_counted_by_its_cause(
    cause: RankError, replaced: tuple[int, ...], cut_off: tuple[int, ...], kind: str
) -> None:
    record = FaultRecord()
    record.begin(cause)
    record.end(RecoveryResult(epoch=1, replaced=replaced, cut_off=cut_off), num_resumed=0)
    assert record.status(EXECUTOR, is_dead=False).num_recoveries == {kind: 1}


def test_the_status_during_and_after_recoveries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([100.0, 102.5, 200.0, 201.0])
    monkeypatch.setattr("inflight.engine.core.fault_record.time.monotonic", lambda: next(times))
    record = FaultRecord()
    before = record.status(EXECUTOR, is_dead=False)
    assert (before.state, before.num_recoveries, before.last_cause, before.last_kind) == ("healthy", {}, "", "")
    assert (before.epoch, before.num_stale_frames, before.spare_workers) == (7, 5, 2)

    record.begin(StepError("bad luck\nand its traceback", rank=0))
    meanwhile = record.status(EXECUTOR, is_dead=False)
    assert (meanwhile.state, meanwhile.last_cause) == ("recovering", "bad luck")  # a cause is one line
    assert meanwhile.last_kind == "step_failed"
    assert (meanwhile.num_recoveries, meanwhile.last_recovery_seconds) == ({}, 0.0)
    assert record.status(EXECUTOR, is_dead=True).state == "failed"

    with caplog.at_level(logging.WARNING):
        record.end(RecoveryResult(epoch=1, replaced=()), num_resumed=3)
    after = record.status(EXECUTOR, is_dead=False)
    assert (after.state, after.last_recovery_seconds, after.num_resumed_requests) == ("healthy", 2.5, 3)

    record.begin(StepError("again", rank=0))
    with caplog.at_level(logging.WARNING):
        record.end(RecoveryResult(epoch=2, replaced=(1, 3)), num_resumed=4)
    last = record.status(EXECUTOR, is_dead=False)
    assert (last.last_cause, last.last_recovery_seconds, last.num_resumed_requests) == ("again", 1.0, 7)
    assert last.num_recoveries == {"step_failed": 2}
    assert [("no rank was replaced" in text, "new ranks: 1, 3" in text) for text in caplog.messages] == [
        (True, False),
        (False, True),
    ]
    assert "recovered in 2.50 s" in caplog.messages[0] and "recovered in 1.00 s" in caplog.messages[1]
