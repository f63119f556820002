"""`FaultToleranceConfig`: what the engine does when one of its processes dies, hangs or fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inflight.config.json_option import from_json
from inflight.setting import setting


@dataclass(frozen=True, kw_only=True)
class FaultToleranceConfig:
    """
    Attributes:
        enabled: repair the engine after a fault. If it is False, a fault of the engine ends it, and all its requests fail.
        engine_recovery_timeout_sec: the longest time that one recovery may take. If ranks need longer, the engine's process
            is started again. If the engine's process needs longer to start, the engine is given up.
        resume_requests_after_recovery: requests in flight go on after a recovery. If it is False, they fail with an error.
        max_recoveries: the most recoveries within one hour. A further fault ends the engine. Recoveries of ranks, restarts of
            the engine's process and restarts of front ends are counted separately.
        spare_workers: how many processes import their libraries, and then wait to replace a rank. If it is above 0, a spare
            engine core with a process for each rank waits, too, unless there are ranks on several machines.
    """

    enabled: bool = setting(True, "Whether the engine is repaired.")
    engine_recovery_timeout_sec: float = setting(
        120.0, "Longest time of a recovery.", bounds=(0, 86400), excludes_low=True
    )
    resume_requests_after_recovery: bool = setting(True, "Whether requests in flight go on after a recovery.")
    max_recoveries: int = setting(10, "Most recoveries within one hour.", bounds=(0, 65536))
    spare_workers: int = setting(0, "Processes that wait to replace a rank.", bounds=(0, 64))


# Any: checked here
def resolve_fault_tolerance(enabled: bool, given: Mapping[str, Any] | None) -> FaultToleranceConfig:
    """Returns the config that `given` (`EngineArgs.fault_tolerance_config`) describes. Missing fields get their defaults.

    Raises:
        ConfigError: an unknown field, or a value out of bounds.
    """
    config = from_json(FaultToleranceConfig, "fault_tolerance_config", given)
    return replace(config, enabled=enabled and config.enabled)
