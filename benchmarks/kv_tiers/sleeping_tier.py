"""`SleepingTier`: a tier in the memory of this process that answers as slowly as the benchmark says."""

from __future__ import annotations

import time
from typing import ClassVar

from inflight.kv_connector.tier import Tier

MODULE_PATH = "benchmarks.kv_tiers.sleeping_tier:SleepingTier"


class SleepingTier(Tier):
    """All objects of the class share what is stored, and the time that a read takes."""

    seconds: ClassVar[float] = 0.0
    stored: ClassVar[dict[bytes, bytes]] = {}

    def __init__(self, options: dict[str, object]) -> None:
        assert not options

    def get(self, name: bytes, into: memoryview) -> int | None:
        time.sleep(self.seconds)
        found = self.stored.get(name)
        if found is None:
            return None
        into[: len(found)] = found
        return len(found)

    def put(self, name: bytes, data: memoryview) -> None:
        self.stored.setdefault(name, bytes(data))

    def close(self) -> None:
        self.stored.clear()
