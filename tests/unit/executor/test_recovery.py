"""When another recovery is allowed."""

from __future__ import annotations

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.executor import recovery
from inflight.executor.recovery import RecoveryLimits


def test_only_recoveries_of_the_last_hour_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
    limits = RecoveryLimits(FaultToleranceConfig(max_recoveries=2))
    for _ in range(2):
        assert limits.problem() == ""
        limits.note()
    assert "2 recoveries within one hour" in limits.problem()
    now[0] = 3601.0
    assert limits.problem() == ""


def test_no_recovery_is_allowed_if_none_is_configured() -> None:
    assert "(max_recoveries)" in RecoveryLimits(FaultToleranceConfig(max_recoveries=0)).problem()
