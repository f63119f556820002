"""How much memory is left for the KV cache of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from inflight.worker import memory_budget
from inflight.worker.memory_budget import MemoryBudget
from tests.conformance.configs import engine_config


class Device:
    """Its free memory is what the test says."""

    kind = "cpu"

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.utilization = 0.0

    def available_memory_bytes(self) -> int:
        return self.free_bytes

    def budget_bytes(self, utilization: float) -> int:
        self.utilization = utilization
        return 1000

    def measure_peak_bytes(self, function: Callable[[], None]) -> int:
        function()
        return 100


class Runner:
    has_run = False

    def profile_run(self) -> None:
        self.has_run = True

    def reserved_bytes(self, peak_bytes: int) -> int:
        assert peak_bytes == 100
        return 20


@pytest.mark.parametrize(
    ("kind", "num_ranks", "weights", "left"),
    [
        ("cpu", 1, 300, 1000 - 300 - 120),
        ("cpu", 2, 300, (1000 - 300) // 2 - 120),  # both ranks measure the weights of both, and each has its own peak
        ("cuda", 2, 300, 1000 - 300 - 120),  # each rank has a GPU of its own
        ("cpu", 1, -50, 1000 - 120),  # another program has freed memory meanwhile
    ],
)
def test_what_is_left(kind: str, num_ranks: int, weights: int, left: int) -> None:
    device: Any = Device(free_bytes=5000)  # Any: only what the budget uses
    device.kind = kind
    config = engine_config(tensor_parallel_size=num_ranks)
    budget = MemoryBudget(config, config.parallel.places[0], device)
    assert device.utilization == 0.9
    device.free_bytes -= weights
    runner: Any = Runner()
    assert budget.measure_available(runner) == left
    assert runner.has_run


@pytest.mark.parametrize(("kind", "left"), [("cpu", 1000 // 4 - 60 - 120), ("cuda", 1000 - 700 - 120)])
def test_replicas_share_the_memory_of_the_machine(kind: str, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others load their weights at the same time, which must not count as this one's."""
    monkeypatch.setattr(memory_budget, "weight_bytes", lambda *_: 60)
    device: Any = Device(free_bytes=5000)
    device.kind = kind
    config = engine_config()
    config = replace(config, parallel=replace(config.parallel, data_parallel_size=4))
    replica = config.replicas()[3]
    budget = MemoryBudget(replica, replica.parallel.places[0], device)
    device.free_bytes -= 700
    runner: Any = Runner()
    assert budget.measure_available(runner) == left
