"""The size of the KV cache: what is taken by default, and what is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.resolve import resolve_cache
from inflight.config.weight_size import check_kv_cache_fits
from inflight.errors import OutOfMemoryError

GIB = 1 << 30


def sizes(device: str, max_model_len: int = 4096, **arguments: Any) -> tuple[int | None, float, int | None]:
    machine = Machine(device=device, num_cores=2, dtypes=("bfloat16",))
    cache = resolve_cache(EngineArgs(**arguments), max_model_len=max_model_len, dtype="bfloat16", machine=machine)
    return cache.memory_bytes, cache.memory_utilization, cache.usual_sequence_len


def test_a_cpu_is_shared_unless_the_user_says_how_much_is_to_be_used() -> None:
    assert sizes("cpu") == (None, 0.5, 1024)
    assert sizes("cpu", max_model_len=300) == (None, 0.5, 300)
    assert sizes("cpu", gpu_memory_utilization=0.8) == (None, 0.8, None)
    assert sizes("cpu", kv_cache_memory_bytes=GIB) == (GIB, 0.5, None)


def test_a_gpu_is_the_engines() -> None:
    assert sizes("cuda") == (None, 0.9, None)
    assert sizes("cuda", kv_cache_memory_bytes=GIB) == (GIB, 0.9, None)


def test_a_size_that_can_never_be_had_is_refused() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        check_kv_cache_fits(10 << 40, weight_bytes=GIB, num_sharing=1, free_bytes=22 * GIB)
    assert str(caught.value) == (
        "kv_cache_memory_bytes=10995116277760 (--kv-cache-memory-bytes) asks for a KV cache of 10240.00 GiB beside 1.00 GiB of "
        "weights, but only 22.00 GiB of memory is free; lower it to 21.00 GiB at most, free memory, or do not set "
        "kv_cache_memory_bytes: then the engine chooses a size that fits into the free memory"
    )
    check_kv_cache_fits(21 * GIB, weight_bytes=GIB, num_sharing=1, free_bytes=22 * GIB)


def test_ranks_on_one_machine_share_its_memory() -> None:
    check_kv_cache_fits(10 * GIB, weight_bytes=GIB, num_sharing=2, free_bytes=22 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"is free, which 2 ranks share; lower it to 9\.00 GiB at most"):
        check_kv_cache_fits(10 * GIB, weight_bytes=GIB, num_sharing=2, free_bytes=20 * GIB)


def test_where_the_weights_leave_nothing_there_is_no_size_to_propose() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"is free; free memory, use a smaller model, or do not set kv_cache_memory_bytes"
    ):
        check_kv_cache_fits(GIB, weight_bytes=3 * GIB, num_sharing=1, free_bytes=2 * GIB)
