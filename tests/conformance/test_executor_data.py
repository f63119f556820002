"""What every executor promises about data: large and odd values arrive as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.interface.kv_cache import KVCacheSpec
from inflight.timeline import Event
from tests.conformance.configs import plan
from tests.conformance.conftest import ExecutorFactory

SPEC = KVCacheSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32", itemsize=4)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, (2, [3.5]), {"a": b"b", (1, 2): None}, True],
        {"spec": SPEC, "events": [Event(1, "forward", 2, 3)]},
        "x" * 200_000,
    ],
)
def test_plain_data_comes_back_as_it_was(executor_factory: ExecutorFactory, value: Any) -> None:
    executor = executor_factory()
    for rank, answer in enumerate(executor.collective_rpc("echo", (value,), {"again": value})):
        assert answer == (rank, (value,), {"again": value})
        assert repr(answer[1][0]) == repr(value)  # tuples are tuples


def test_large_arrays_come_back_as_they_were(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    large = np.arange(3_000_000, dtype=np.float32).reshape(3, -1)
    answers = executor.collective_rpc("echo", (large, large[:, ::2]), timeout=300)
    for rank in range(executor.world_size):
        (first, second) = answers[rank][1]
        np.testing.assert_array_equal(first, large)
        np.testing.assert_array_equal(second, large[:, ::2])


def test_many_large_calls_in_flight_do_not_block_one_another(executor_factory: ExecutorFactory) -> None:
    """Both directions are full at once: neither side may wait for the other to read."""
    executor = executor_factory()
    large = np.zeros(500_000, dtype=np.int64)
    futures = [executor.collective_rpc("echo", (large,), non_block=True) for _ in range(10)]
    assert executor.execute_model(plan(0)).step_id == 0
    for future in futures:
        assert len(future.result(timeout=300)) == executor.world_size
