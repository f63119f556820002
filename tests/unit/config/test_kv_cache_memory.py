"""The size of the KV cache that is taken by default."""

from __future__ import annotations

from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.resolve import resolve_cache

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
