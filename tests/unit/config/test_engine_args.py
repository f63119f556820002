"""`EngineArgs`: what its properties make of several arguments, and which combinations are allowed."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.replica_conflicts import MAX_LOCAL_REPLICAS
from inflight.errors import ConfigError
from inflight.setting import settings_of

HEAD = {"data_parallel_size": 2, "data_parallel_address": "10.0.0.1"}


def test_known_names_are_taken() -> None:
    assert EngineArgs.from_kwargs({"model": "m", "max_num_seqs": 3}) == EngineArgs(model="m", max_num_seqs=3)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kv_cache_memory_bytes", "200M", 200 * 2**20),
        ("kv_cache_memory_bytes", "1.5GiB", 3 * 2**29),
        ("max_model_len", "32k", 32000),
        ("max_num_batched_tokens", "2K", 2048),
        ("target_inter_token_latency", "50", 50.0),
        ("max_step_time", "none", "none"),
    ],
)
def test_sizes_may_be_texts_as_on_the_command_line(name: str, text: str, value: object) -> None:
    assert getattr(EngineArgs(**{name: text}), name) == value  # type: ignore[arg-type]
    assert EngineArgs.from_kwargs({name: text}) == EngineArgs(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["kv_cache_memory_bytes", "max_model_len", "max_num_batched_tokens", "max_step_time"])
@pytest.mark.parametrize("text", ["", "much", "-5", "0", "12 apples", "9999999999T"])
def test_a_wrong_size_is_one_error_with_its_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}"):
        EngineArgs(**{name: text})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "routes"),
    [
        ({"data_parallel_size": 2}, True),
        ({}, False),
        ({"data_parallel_size": 2, "data_parallel_routing": "load"}, False),
        ({"data_parallel_size": 2, "enable_prefix_caching": False}, False),
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, False),  # one replica, whose server does not choose
        ({**HEAD, "data_parallel_size_local": 1}, True),
    ],
)
def test_when_the_prefix_chooses_the_replica(arguments: dict[str, Any], routes: bool) -> None:
    assert EngineArgs(**arguments).routes_by_prefix == routes


@pytest.mark.parametrize(
    ("arguments", "here", "served"),
    [
        ({}, range(1), range(1)),
        ({"data_parallel_size": 3}, range(3), range(3)),
        ({"data_parallel_size": 3, "data_parallel_rank": 2}, range(2, 3), range(2, 3)),
        ({"data_parallel_size": 3, "data_parallel_rank": 0, "data_parallel_size_local": 1}, range(1), range(1)),
        ({"data_parallel_size": 3, "data_parallel_rank": 0, "data_parallel_external_lb": True}, range(1), range(1)),
        (
            {
                "data_parallel_size": 5,
                "data_parallel_size_local": 2,
                "data_parallel_start_rank": 3,
                "data_parallel_hybrid_lb": True,
            },
            range(3, 5),
            range(3, 5),
        ),
        ({**HEAD, "data_parallel_size_local": 1}, range(1), range(2)),
        ({"data_parallel_size": MAX_LOCAL_REPLICAS}, range(64), range(64)),
        ({"data_parallel_size": 65, "data_parallel_rank": 64}, range(64, 65), range(64, 65)),
    ],
)
def test_replicas(arguments: dict[str, Any], here: range, served: range) -> None:
    args = EngineArgs(**arguments)
    assert (args.replicas, args.served_replicas) == (here, served)


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ({}, {}),
        ({"hf_overrides": {"vocab_size": 7}}, {"vocab_size": 7}),
        ({"dtype": "float32"}, {"dtype": "float32"}),
        ({"dtype": "float32", "hf_overrides": {"dtype": "float16"}}, {"dtype": "float16"}),
    ],
)
def test_a_given_dtype_is_an_override(arguments: dict[str, Any], overrides: dict[str, Any]) -> None:
    assert EngineArgs(**arguments).config_overrides == overrides


@pytest.mark.parametrize(
    "arguments",
    [
        {"distributed_executor_backend": "package.module:Class"},
        {"distributed_executor_backend": "package:Class", "nnodes": 2},
        {"distributed_executor_backend": "mp", "nnodes": 2},
        {"nnodes": 2},
        {"max_num_partial_prefills": 3, "max_long_partial_prefills": 3},
        {"enforce_eager": True, "cuda_graph_max_tokens": 0},
        {"cuda_graph_max_tokens": 5},
        {"target_inter_token_latency": "none", "distributed_executor_backend": "external_launcher"},
        {"target_inter_token_latency": "auto", "enable_chunked_prefill": False},
        {"target_inter_token_latency": 1e-3, "max_step_time": 1e-3},
        {"max_step_time": "none"},
        {"data_parallel_size": 2, "data_parallel_rank": 0, "nnodes": 2},
        {"gpu_memory_utilization": 1.0},
    ],
)
def test_what_goes_together(arguments: dict[str, Any]) -> None:
    assert EngineArgs.from_kwargs(arguments) == EngineArgs(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"distributed_executor_backend": "external_launcher", "data_parallel_size": 2},
            "with distributed_executor_backend='external_launcher': Inflight starts the ranks",
        ),
        ({"distributed_executor_backend": "package.module:"}, "nor a class named as 'package.module:ClassName'"),
        (
            {"data_parallel_rank": 0, "data_parallel_size_local": 2},
            "data_parallel_rank=0 with data_parallel_size_local=2",
        ),
        ({"data_parallel_rank": 1}, "data_parallel_rank=1: this machine's last replica would have number 1"),
        ({"data_parallel_external_lb": True, "data_parallel_hybrid_lb": True}, "one replica, or several"),
        ({"max_step_time": "none", "target_inter_token_latency": "slow"}, "auto, none or a number of milliseconds"),
        ({"max_step_time": [1]}, r"max_step_time=\[1\] must be none or"),
        (
            {"node_rank": 1, "enforce_eager": True, "cuda_graph_max_tokens": 1},
            "node_rank=1: .*; enforce_eager=True with cuda_graph_max_tokens=1",
        ),
        ({"max_num_seqs": 0, "max_step_time": 0}, "max_num_seqs=0 .*; max_step_time=0 must be"),
    ],
)
def test_what_does_not_go_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**arguments)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("target_inter_token_latency", "50", 50.0),
        ("target_inter_token_latency", "auto", "auto"),
        ("max_step_time", "2.5", 2.5),
        ("max_step_time", "none", "none"),
        ("max_model_len", "4k", 4000),
        ("max_num_batched_tokens", "4K", 4096),
        ("kv_cache_memory_bytes", "2G", 2**31),
    ],
)
def test_texts_of_the_command_line(name: str, text: str, value: object) -> None:
    parse = settings_of(EngineArgs)[name].parse
    assert parse is not None and parse(text) == value


def test_secrets_are_marked() -> None:
    assert [name for name, each in settings_of(EngineArgs).items() if each.is_secret] == ["kv_transfer_config"]
