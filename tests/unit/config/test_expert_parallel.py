"""Which rank has which experts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.expert_parallel import expert_room, experts_of
from inflight.config.machine import Machine
from inflight.config.parse_architecture import parse_architecture
from inflight.config.resolve import find_conflicts, resolve
from inflight.errors import ConfigError
from tests.support.model_zoo import FAMILY_CONFIGS
from tests.unit.config.fake_driver import H200
from tests.unit.config.test_device_options import CPU, gpus


def resolved(family: str, machine: Machine = CPU, config: int = 0, **arguments: Any) -> EngineConfig:
    architecture = parse_architecture({**FAMILY_CONFIGS[family][config].to_dict(), "architectures": None})
    args = EngineArgs(enable_expert_parallel=True, **arguments)
    given: Any = {"folder": Path("m"), "architecture": architecture, "machine": machine}
    return resolve(args, **given, timeout_seconds=60.0)


@pytest.mark.parametrize(("num_experts", "size"), [(8, 3), (5, 2), (128, 7), (4, 4)])
def test_each_expert_has_one_rank_and_no_rank_has_many_more(num_experts: int, size: int) -> None:
    parts = [experts_of(num_experts, rank, size) for rank in range(size)]
    assert [expert for part in parts for expert in part] == list(range(num_experts))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1 and counts[0] == min(counts)  # the loader counts on the second


def test_the_size_of_an_expert_need_not_be_divisible_but_that_of_a_shared_one() -> None:
    odd = FAMILY_CONFIGS["qwen3_moe"][0].to_dict() | {"moe_intermediate_size": 33, "architectures": None}
    machine, architecture = CPU, parse_architecture(odd)
    given: Any = {"folder": Path("m"), "architecture": architecture, "machine": machine, "timeout_seconds": 60.0}
    whole = resolve(EngineArgs(tensor_parallel_size=2, enable_expert_parallel=True), **given)
    assert whole.parallel.all2all_backend == "shared_memory"
    assert whole.model.architecture == architecture
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide"):
        resolve(EngineArgs(tensor_parallel_size=2), **given)
    shared = FAMILY_CONFIGS["qwen2_moe"][0].to_dict() | {"shared_expert_intermediate_size": 33, "architectures": None}
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide"):
        resolve(
            EngineArgs(tensor_parallel_size=2, enable_expert_parallel=True),
            **(given | {"architecture": parse_architecture(shared)}),
        )


def test_the_room_has_a_place_for_each_part_of_the_shared_expert() -> None:
    architecture = resolved("qwen2_moe", tensor_parallel_size=2).model.architecture
    alone, parts = expert_room(architecture, 1), expert_room(architecture, 2)
    assert parts.choices_per_row == alone.choices_per_row + 1


def test_without_the_option_nothing_changes() -> None:
    assert EngineArgs().all2all_backend is None
    with pytest.raises(ConfigError, match="all2all_backend='shared_memory' without enable_expert_parallel"):
        EngineArgs(all2all_backend="shared_memory")
    with pytest.raises(ConfigError, match="all2all_backend"):
        EngineArgs(enable_expert_parallel=True, all2all_backend="pplx")
    given = resolved("qwen3_moe", tensor_parallel_size=2, all2all_backend="allgather_reducescatter")
    assert given.parallel.all2all_backend == "allgather_reducescatter"


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Llama.* has no layers with experts"):
        resolved("llama", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="with one rank"):
        resolved("qwen3_moe")
    with pytest.raises(ConfigError, match="only 4 experts"):
        resolved("mixtral", tensor_parallel_size=8)
    with pytest.raises(ConfigError, match="on cuda"):
        resolved("qwen3_moe", gpus(H200, H200), tensor_parallel_size=2)


def test_the_check_of_options_names_the_conflict() -> None:
    dense = parse_architecture({**FAMILY_CONFIGS["llama"][0].to_dict(), "architectures": None})
    args = EngineArgs(tensor_parallel_size=2, enable_expert_parallel=True)
    (conflict,) = find_conflicts(args, folder=Path("m"), architecture=dense, machine=CPU)
    assert "has no layers with experts" in conflict


def test_replicas_divide_the_experts_among_all_their_ranks() -> None:
    parallel = resolved("qwen3_moe", data_parallel_size=2).parallel
    assert parallel.is_in_lockstep and parallel.distributed_executor_backend == "mp" and parallel.world_size == 1
    assert not resolved("qwen3_moe", tensor_parallel_size=2).parallel.is_in_lockstep
    with pytest.raises(ConfigError, match="only 4 experts"):
        resolved("mixtral", tensor_parallel_size=2, data_parallel_size=3)
    assert resolved("mixtral", tensor_parallel_size=2, data_parallel_size=2).parallel.is_in_lockstep
    with pytest.raises(ConfigError, match="has no layers with experts"):
        resolved("llama", data_parallel_size=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data_parallel_rank": 0}, "only 1 of them would"),
        ({"data_parallel_size_local": 1, "data_parallel_hybrid_lb": True}, "only 1 of them would"),
        ({"data_parallel_size_local": 1, "data_parallel_address": "10.0.0.1"}, "only 1 of them would"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"distributed_executor_backend": "uni"}, "distributed_executor_backend='uni'"),
    ],
)
def test_replicas_that_cannot_keep_step_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel=True with data_parallel_size=2") as refused:
        resolved("qwen3_moe", data_parallel_size=2, **arguments)
    assert named in str(refused.value)
