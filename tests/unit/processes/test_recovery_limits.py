"""When another recovery is allowed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.processes import recovery_limits
from inflight.processes.recovery_limits import RecoveryLimits


def test_only_recoveries_of_the_last_hour_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(recovery_limits, "time", clock)
    limits = RecoveryLimits(FaultToleranceConfig(max_recoveries=2))
    for _ in range(2):
        assert limits.problem() == ""
        limits.record()
    assert "2 recoveries within one hour" in limits.problem()
    clock.now = 3601.0
    assert limits.problem() == ""


def test_no_recovery_is_allowed_if_none_is_configured() -> None:
    assert "(max_recoveries)" in RecoveryLimits(FaultToleranceConfig(max_recoveries=0)).problem()


def test_only_the_oldest_recovery_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(recovery_limits, "time", clock)
    limits = RecoveryLimits(FaultToleranceConfig(max_recoveries=2))
    for clock.now in (0.0, 3000.0):
        limits.record()
    clock.now = 3700.0
    assert limits.problem() == ""
    limits.record()
    assert limits.problem()
    clock.now = 6700.0
    assert limits.problem() == ""
