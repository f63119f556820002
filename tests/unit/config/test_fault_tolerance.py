"""`fault_tolerance_config`: what is completed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig, resolve_fault_tolerance
from inflight.errors import ConfigError


def test_what_is_left_out_is_completed() -> None:
    assert resolve_fault_tolerance(True, None) == FaultToleranceConfig()
    given = {"engine_recovery_timeout_sec": 7, "max_recoveries": 0}
    wanted = FaultToleranceConfig(enabled=False, engine_recovery_timeout_sec=7, max_recoveries=0)
    assert resolve_fault_tolerance(False, given) == wanted
    assert resolve_fault_tolerance(True, {**given, "enabled": False}) == wanted


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"recoveries": 1}, r"no 'recoveries'; did you mean 'max_recoveries'"),
        (
            {"engine_recovery_timeout_seconds": 1},
            "no 'engine_recovery_timeout_seconds'; did you mean 'engine_recovery_timeout_sec'",
        ),
        ({"engine_recovery_timeout_sec": 0}, r"engine_recovery_timeout_sec=0 is not a number in \(0"),
        ({"resume_requests_after_recovery": "yes"}, "resume_requests_after_recovery='yes' is not True or False"),
        ({"max_recoveries": -1}, "max_recoveries=-1"),
        ({"enabled": "no"}, "enabled='no' is not True or False"),
        ({"spare_workers": True}, "spare_workers=True"),
    ],
)
def test_a_wrong_field_is_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_fault_tolerance(True, given)
