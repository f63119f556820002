"""How much memory is left for the KV cache of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from inflight.errors import OutOfMemoryError
from inflight.worker.memory_budget import MemoryBudget
from tests.conformance.configs import engine_config

GIB = 1 << 30


class Device:
    """Its free memory is what the test says."""

    kind = "cpu"

    def __init__(self, free_bytes: int, budget_bytes: int = 1000) -> None:
        self.free_bytes, self._budget_bytes = free_bytes, budget_bytes
        self.utilization = 0.0

    def available_memory_bytes(self) -> int:
        return self.free_bytes

    def budget_bytes(self, utilization: float) -> int:
        self.utilization = utilization
        return self._budget_bytes

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
def test_replicas_share_the_memory_of_the_machine(kind: str, left: int) -> None:
    """Others load their weights at the same time, which must not count as this one's."""
    device: Any = Device(free_bytes=5000)
    device.kind = kind
    config = engine_config()
    config = replace(config, parallel=replace(config.parallel, replicas=(0, 1, 2, 3)))
    replica = config.replicas()[3]
    budget = MemoryBudget(replica, replica.parallel.places[0], device)
    budget.check_before_loading(60)
    device.free_bytes -= 700
    runner: Any = Runner()
    assert budget.measure_available(runner) == left


def budget(free_bytes: int, budget_bytes: int = 1000, num_ranks: int = 1, **cache: Any) -> MemoryBudget:
    """`cache`: fields of the CacheConfig."""
    device: Any = Device(free_bytes, budget_bytes)
    config = engine_config(tensor_parallel_size=num_ranks)
    config = replace(config, cache=replace(config.cache, **cache))
    return MemoryBudget(config, config.parallel.places[0], device)


def refusal(num_bytes: int, budget_bytes: int, free_bytes: int, memory_utilization: float = 0.9) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        budget(free_bytes, budget_bytes, memory_utilization=memory_utilization)._check_weights(num_bytes, 24 * GIB)
    return str(caught.value)


def test_weights_that_do_not_fit_are_refused_with_what_to_do() -> None:
    text = refusal(60 * GIB, 21 * GIB, 23 * GIB)
    assert text == (
        "the weights of a rank are 60.00 GiB, but the engine may use 21.00 GiB of its GPU, which has 24.00 GiB, 23.00 GiB of "
        "them free (gpu_memory_utilization=0.9); set quantization, raise tensor_parallel_size or "
        "pipeline_parallel_size, or use a larger GPU"
    )
    assert "; raise gpu_memory_utilization=0.5, set" in refusal(15 * GIB, 12 * GIB, 23 * GIB, 0.5)
    assert "; end other programs that use the GPU, set" in refusal(15 * GIB, 10 * GIB, 10 * GIB)


def test_weights_that_fit() -> None:
    budget(6, 5)._check_weights(5, 7)


def test_a_size_that_can_never_be_had_is_refused() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        budget(22 * GIB, memory_bytes=10 << 40).check_before_loading(GIB)
    assert str(caught.value) == (
        "kv_cache_memory_bytes=10995116277760 (--kv-cache-memory-bytes) asks for a KV cache of 10240.00 GiB beside 1.00 GiB of "
        "weights, but only 22.00 GiB of memory is free; lower it to 21.00 GiB at most, free memory, or do not set "
        "kv_cache_memory_bytes: then the engine chooses a size that fits into the free memory"
    )
    budget(22 * GIB, memory_bytes=21 * GIB).check_before_loading(GIB)


def test_ranks_on_one_machine_share_its_memory() -> None:
    budget(22 * GIB, num_ranks=2, memory_bytes=10 * GIB).check_before_loading(GIB)
    with pytest.raises(OutOfMemoryError, match=r"is free, which 2 ranks share; lower it to 9\.00 GiB at most"):
        budget(20 * GIB, num_ranks=2, memory_bytes=10 * GIB).check_before_loading(GIB)


def test_where_the_weights_leave_nothing_there_is_no_size_to_propose() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"is free; free memory, use a smaller model, or do not set kv_cache_memory_bytes"
    ):
        budget(2 * GIB, memory_bytes=GIB).check_before_loading(3 * GIB)
