"""The steady time between steps: bubbles count, stalls do not."""

from __future__ import annotations

from typing import cast

import pytest

from benchmarks.overlap.pipeline_overlap import Measured
from inflight.config.engine import SchedulerConfig


def test_the_steady_period_sees_bubbles_and_no_stalls() -> None:
    def steady(periods: list[float]) -> float:
        scheduler = cast(SchedulerConfig, None)  # it has no part in the period
        return Measured(periods=periods, slowest_stage=20.0, events={}, scheduler=scheduler).steady

    assert steady([20.0, 20.0, 50.0] * 20) == pytest.approx(30.0)
    assert steady([20.0] * 40 + [500.0] + [20.0] * 40) == pytest.approx(20.0)
    assert steady([20.0, 30.0]) == pytest.approx(25.0)
