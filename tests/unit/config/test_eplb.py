"""Copies of busy experts: what the options mean, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.eplb import EplbConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.config.resolve import find_conflicts
from inflight.errors import ConfigError
from tests.support.model_zoo import FAMILY_CONFIGS
from tests.unit.config.fake_driver import H200
from tests.unit.config.test_device_options import CPU, gpus
from tests.unit.config.test_expert_parallel import resolved


def eplb(**config: Any) -> EplbConfig | None:
    return resolved("qwen3_moe", data_parallel_size=2, enable_eplb=True, eplb_config=config).parallel.eplb


def test_without_the_option_no_expert_is_copied() -> None:
    assert resolved("qwen3_moe", data_parallel_size=2).parallel.eplb is None


def test_the_defaults_and_what_was_given() -> None:
    assert eplb() == EplbConfig(num_redundant_experts=2), "one place for each rank"
    given: dict[str, Any] = {
        "window_size": 7,
        "step_interval": 9,
        "num_redundant_experts": 5,
        "use_async": False,
        "log_balancedness": True,
    }
    assert eplb(**given) == EplbConfig(**given)


def test_what_only_vllm_has_is_told_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert eplb(policy="default", communicator=None) == EplbConfig(num_redundant_experts=2)
    assert "eplb_config: policy, communicator has no meaning here, and is ignored" in caplog.text


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"step_interval": 0}, r"eplb_config: step_interval=0 is not an integer in \[1, "),
        ({"num_redundant_experts": 0}, "num_redundant_experts=0"),
        ({"num_redundant_experts": 9}, "num_redundant_experts=9, but with 2 ranks and 8 experts in a layer"),
        ({"use_async": "yes"}, "use_async='yes'"),
    ],
)
def test_a_wrong_value_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        eplb(**config)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data_parallel_size": 1, "tensor_parallel_size": 2}, "enable_eplb=True with data_parallel_size=1"),
        (
            {"all2all_backend": "allgather_reducescatter"},
            "enable_eplb=True with all2all_backend='allgather_reducescatter'",
        ),
        ({"machine": gpus(H200, H200)}, "on cuda"),
    ],
)
def test_ranks_that_cannot_copy_experts_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolved("qwen3_moe", **{"data_parallel_size": 2, "enable_eplb": True, **arguments})


def test_it_is_for_whole_experts_only() -> None:
    with pytest.raises(ConfigError, match="enable_eplb=True with enable_expert_parallel=False"):
        EngineArgs(enable_eplb=True)
    with pytest.raises(ConfigError, match=r"eplb_config=\{'window_size': 5\} with enable_eplb=False"):
        EngineArgs(enable_expert_parallel=True, eplb_config={"window_size": 5})
    dense = parse_architecture({**FAMILY_CONFIGS["llama"][0].to_dict(), "architectures": None})
    args = EngineArgs(data_parallel_size=2, enable_expert_parallel=True, enable_eplb=True)
    (conflict,) = find_conflicts(args, folder=Path("m"), architecture=dense, machine=CPU)
    assert "has no layers with experts" in conflict
