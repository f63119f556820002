"""How much memory is left for the KV cache of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.weight_room import Beside
from inflight.device import host_memory
from inflight.errors import OutOfMemoryError
from inflight.model_loader.weight_size import WeightSizes
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
    mapped_bytes = 0
    packed_key = ""

    def profile_run(self) -> None:
        self.has_run = True

    def reserved_bytes(self, peak_bytes: int) -> int:
        assert peak_bytes == 100
        return 20


@pytest.fixture(autouse=True)
def own_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What this process uses, in bytes; the test may change it."""
    own = [0]
    monkeypatch.setattr(host_memory, "own_bytes", lambda: own[0])
    return own


def left_for_cache(
    own: list[int],
    *,
    free: int,
    weights: int,
    loaded: int | None = None,
    share: float = 0.5,
    kind: str = "cpu",
    mapped: int = 0,
    num_ranks: int = 1,
    num_replicas: int = 1,
    backend: str = "mp",
    **changes: Any,
) -> int:
    """What `measure_available` says. `weights`: of one rank, as its files say; `loaded`: as it has them in memory,
    without the pages of a file that are `mapped`."""
    device: Any = Device(free_bytes=free, budget_bytes=1000)
    device.kind = kind
    config = engine_config(tensor_parallel_size=num_ranks)
    config = replace(
        config,
        cache=replace(config.cache, memory_utilization=share, **changes),
        parallel=replace(config.parallel, replicas=tuple(range(num_replicas)), distributed_executor_backend=backend),
    )
    made = MemoryBudget(config, config.parallel.places[0], device)
    if kind == "cpu":
        made.check_before_loading(WeightSizes(rank=weights, whole=weights))
    own[0] += weights if loaded is None else loaded
    device.free_bytes -= num_ranks * num_replicas * weights
    runner: Any = Runner()
    runner.mapped_bytes = mapped
    result = made.measure_available(runner)
    assert runner.has_run and device.utilization == share
    return result


def test_mapped_weights_count_as_those_in_memory(own_bytes: list[int]) -> None:
    in_memory = left_for_cache(own_bytes, free=5000, weights=300, loaded=900)
    own_bytes[0] = 0
    assert left_for_cache(own_bytes, free=5000, weights=300, loaded=0, mapped=900) == in_memory
    own_bytes[0] = 0
    assert left_for_cache(own_bytes, free=5000, weights=300) > in_memory


def test_on_a_gpu_the_weights_are_a_part_of_the_share(own_bytes: list[int]) -> None:
    assert left_for_cache(own_bytes, free=5000, weights=300, kind="cuda") == 1000 - 300 - 120
    assert left_for_cache(own_bytes, free=5000, weights=-50, kind="cuda") == 1000 - 120  # another program freed memory


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "left"),
    [
        (1, 1, (5000 - 300) // 2 - 120),
        (2, 1, (5000 - 600) // 4 - 120),  # each rank has its own peak
        (1, 4, (5000 - 1200) // 8 - 120),
        (2, 3, (5000 - 1800) // 12 - 120),
    ],
)
def test_on_a_cpu_all_share_what_the_weights_leave(
    own_bytes: list[int], num_ranks: int, num_replicas: int, left: int
) -> None:
    found = left_for_cache(own_bytes, free=5000, weights=300, num_ranks=num_ranks, num_replicas=num_replicas)
    assert found == left


def test_a_model_of_nearly_all_memory_runs(own_bytes: list[int]) -> None:
    """4 GB of weights in 5 GB: the share of 0.5 is for the rest."""
    assert left_for_cache(own_bytes, free=5000, weights=4000) == 500 - 120


def test_weights_that_are_unpacked_count_as_they_are(own_bytes: list[int]) -> None:
    """A checkpoint of 8 bits is counted as 4 bits before it is loaded."""
    assert left_for_cache(own_bytes, free=5000, weights=300, loaded=600) == (5000 - 600) // 2 - 120
    assert left_for_cache(own_bytes, free=5000, weights=300, loaded=600, num_replicas=2) == (5000 - 1200) // 4 - 120


def test_ranks_that_are_threads_have_the_weights_of_all_in_one_process(own_bytes: list[int]) -> None:
    found = left_for_cache(own_bytes, free=5000, weights=300, loaded=1200, num_ranks=2, backend="uni")
    assert found == (5000 - 1200) // 4 - 120


def test_a_host_pool_is_no_room_for_the_cache(own_bytes: list[int]) -> None:
    transfer: Any = SimpleNamespace(cpu_bytes=800)
    assert left_for_cache(own_bytes, free=5000, weights=300, num_ranks=2, transfer=transfer) == 3600 // 4 - 120
    assert left_for_cache(own_bytes, free=5000, weights=300, num_replicas=2, transfer=transfer) == 2800 // 4 - 120


@pytest.mark.parametrize("taken", [0, 900, 2500])
def test_a_rank_that_starts_late_reckons_with_the_memory_before_the_start(own_bytes: list[int], taken: int) -> None:
    """Other ranks have `taken` memory already. Each process has used 40 bytes for its libraries."""
    own_bytes[0] = 40
    config = engine_config(tensor_parallel_size=2)
    config = replace(
        config,
        cache=replace(config.cache, memory_utilization=0.5),
        device=replace(config.device, free_host_bytes=5000),
        parallel=replace(config.parallel, distributed_executor_backend="mp"),
    )
    device: Any = Device(free_bytes=4920 - taken)
    made = MemoryBudget(config, config.parallel.places[1], device)
    made.check_before_loading(WeightSizes(rank=2000, whole=2000))
    own_bytes[0] += 2000
    runner: Any = Runner()
    assert made.measure_available(runner) == 920 // 4 - 120


def weights(num_bytes: int, int4: int | None = None) -> WeightSizes:
    return WeightSizes(rank=num_bytes, whole=num_bytes, beside=Beside(0, {} if int4 is None else {"int4": int4}))


def budget(free_bytes: int, budget_bytes: int = 1000, num_ranks: int = 1, **cache: Any) -> MemoryBudget:
    """`cache`: fields of the CacheConfig."""
    device: Any = Device(free_bytes, budget_bytes)
    config = engine_config(tensor_parallel_size=num_ranks)
    config = replace(config, cache=replace(config.cache, **cache))
    return MemoryBudget(config, config.parallel.places[0], device)


def refusal(num_bytes: int, budget_bytes: int, free_bytes: int, memory_utilization: float = 0.9) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        budget(free_bytes, budget_bytes, memory_utilization=memory_utilization)._check_weights_on_gpu(
            num_bytes, 24 * GIB
        )
    return str(caught.value)


def test_the_share_of_a_gpu_is_for_this_engine_and_must_be_free() -> None:
    """Two engines with 0.45 each share a GPU of 100 GiB; a third one does not fit."""
    second = budget(54 * GIB, 45 * GIB, memory_utilization=0.45)
    second._check_weights_on_gpu(30 * GIB, 100 * GIB)
    third = budget(9 * GIB, 45 * GIB, memory_utilization=0.45)
    with pytest.raises(OutOfMemoryError, match=r"0\.45 is 45\.00 GiB .* only 9\.00 GiB .* lower it to 0\.09 at most"):
        third._check_weights_on_gpu(3 * GIB, 100 * GIB)
    for known in ({"memory_bytes": GIB}, {"num_blocks": 7, "memory_bytes": GIB}):
        budget(9 * GIB, 45 * GIB, memory_utilization=0.45, **known)._check_weights_on_gpu(3 * GIB, 100 * GIB)


def replicated(free_bytes: int, num_replicas: int, num_ranks: int = 1, **cache: Any) -> MemoryBudget:
    config = engine_config(tensor_parallel_size=num_ranks)
    parallel = replace(config.parallel, replicas=tuple(range(num_replicas)))
    config = replace(config, cache=replace(config.cache, **cache), parallel=parallel)
    device: Any = Device(free_bytes)
    return MemoryBudget(config, config.parallel.places[0], device)


@pytest.mark.parametrize(
    ("free", "num_ranks", "num_replicas", "size", "advice"),
    [
        (2 * GIB, 1, 1, 3 * GIB, ["--quantization int4", "smaller model"]),
        (5 * GIB, 2, 1, 3 * GIB, ["--quantization int4"]),
        (5 * GIB, 1, 2, 3 * GIB, ["lower data_parallel_size"]),
        (17 * GIB, 2, 3, 3 * GIB, ["lower data_parallel_size"]),
    ],
)
def test_weights_that_do_not_fit_the_host_are_refused_before_they_are_read(
    free: int, num_ranks: int, num_replicas: int, size: int, advice: list[str]
) -> None:
    made = replicated(free, num_replicas, num_ranks)
    with pytest.raises(OutOfMemoryError) as caught:
        made.check_before_loading(weights(size, size // 3))
    for part in (*advice, f"{num_ranks * num_replicas * 3}.00 GiB", f"{free // GIB}.00 GiB"):
        assert part in str(caught.value)
    replicated(18 * GIB, num_replicas, num_ranks).check_before_loading(weights(size))


def test_later_starts_look_at_their_own_weights_only() -> None:
    """The other replicas and ranks have their memory already."""
    replicated(4 * GIB, 3, num_blocks=7, memory_bytes=100 * GIB).check_before_loading(weights(3 * GIB))
    with pytest.raises(OutOfMemoryError, match=r"3\.00 GiB of memory, but only 2\.00 GiB"):
        replicated(2 * GIB, 3, num_blocks=7).check_before_loading(weights(3 * GIB))


# (what each may have, of 20 GiB): arena, host pool of an engine, ranks, replicas
@pytest.mark.parametrize(
    ("arena", "host_pool", "num_ranks", "num_replicas"),
    [(None, 24, 1, 1), (None, 36, 2, 1), (16, 16, 1, 1), (None, 18, 1, 2), (18, 0, 1, 2), (6, 4, 1, 2), (6, 9, 2, 1)],
)
def test_what_all_ranks_and_replicas_ask_for_is_added_up(
    arena: int | None, host_pool: int, num_ranks: int, num_replicas: int
) -> None:
    def made(free: int) -> MemoryBudget:
        transfer: Any = SimpleNamespace(cpu_bytes=host_pool * GIB) if host_pool else None
        memory_bytes = None if arena is None else arena * GIB
        return replicated(free, num_replicas, num_ranks, memory_bytes=memory_bytes, transfer=transfer)

    needed = ((arena or 0) + 1) * num_ranks * num_replicas + host_pool * num_replicas
    made(needed * GIB).check_before_loading(weights(GIB))
    with pytest.raises(OutOfMemoryError, match="lower it to"):
        made(needed * GIB - 1).check_before_loading(weights(GIB))


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
    budget(6, 5)._check_weights_on_gpu(5, 7)


def test_a_size_that_can_never_be_had_is_refused() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        budget(22 * GIB, memory_bytes=10 << 40).check_before_loading(weights(GIB))
    assert str(caught.value) == (
        "kv_cache_memory_bytes=10995116277760 (--kv-cache-memory-bytes) asks for a KV cache of 10240.00 GiB beside 1.00 GiB of "
        "weights, but only 22.00 GiB of memory is free; lower it to 21.00 GiB at most, free memory, or do not set "
        "kv_cache_memory_bytes: then the engine chooses a size that fits into the free memory"
    )
    budget(22 * GIB, memory_bytes=21 * GIB).check_before_loading(weights(GIB))


def test_ranks_on_one_machine_share_its_memory() -> None:
    budget(22 * GIB, num_ranks=2, memory_bytes=10 * GIB).check_before_loading(weights(GIB))
    with pytest.raises(OutOfMemoryError, match=r"2 ranks share.*9\.00 GiB"):
        budget(20 * GIB, num_ranks=2, memory_bytes=10 * GIB).check_before_loading(weights(GIB))


def test_where_the_weights_leave_nothing_there_is_no_size_to_propose() -> None:
    with pytest.raises(OutOfMemoryError, match=r"do not set kv_cache_memory_bytes"):
        budget(2 * GIB, memory_bytes=GIB).check_before_loading(weights(2 * GIB))
