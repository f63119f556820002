"""`EngineArgs` and `resolve`: every "auto" becomes a value, what does not fit is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.config.architecture import TRANSFORMERS, GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.engine import EngineConfig, ModelConfig, QuantizationConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine, detect_machine
from inflight.config.milliseconds import MAX_MILLISECONDS
from inflight.config.mixers import AttentionSpec, GatedDeltaSpec, RopeConfig
from inflight.config.ranks import ranks_of_node
from inflight.config.resolve import DEFAULT_DEPTH, resolve
from inflight.config.weight_format import STORED_QUANTIZATIONS
from inflight.errors import ConfigError

ARCHITECTURE = ModelArchitecture(
    name="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    layers=(
        LayerSpec(
            mixer=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig()), mlp=GatedMlpSpec(size=128)
        ),
    )
    * 2,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    dtype="bfloat16",
)
WHAT_TO_DO = r"; (give|lower|raise|leave|use|change|correct) |: (use|run|give) |here run "
MACHINE = Machine(device="cpu", num_cores=6, dtypes=("bfloat16", "float32"))


def resolved(architecture: ModelArchitecture = ARCHITECTURE, **arguments: Any) -> EngineConfig:
    return resolve(
        EngineArgs(**arguments), folder=Path("model"), architecture=architecture, machine=MACHINE, timeout_seconds=60.0
    )


def test_the_cache_of_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_WEIGHT_CACHE", "on")
    assert resolved().model.weight_cache_bytes == 40_000_000_000
    assert resolved(weight_cache_gb=0.5).model.weight_cache_bytes == 500_000_000
    assert resolved(weight_cache=False).model.weight_cache_bytes == 0
    monkeypatch.setenv("INFLIGHT_WEIGHT_CACHE", "off")
    assert resolved(weight_cache_gb=0.5).model.weight_cache_bytes == 0
    monkeypatch.setenv("INFLIGHT_WEIGHT_CACHE", "no")
    with pytest.raises(ConfigError, match="INFLIGHT_WEIGHT_CACHE"):
        resolved()


def test_defaults() -> None:
    config = resolved()
    assert config.model.dtype == config.cache.dtype == "bfloat16"
    assert config.model.max_model_len == 4096
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 2048)
    assert (config.cache.block_size, config.cache.memory_bytes, config.cache.usual_sequence_len) == (16, None, 1024)
    assert config.device.num_threads == 6


@pytest.mark.parametrize(
    ("stored", "wanted", "served"),
    [("float32", "auto", "float32"), ("float16", "auto", "bfloat16"), ("bfloat16", "float32", "float32")],
)
def test_dtype(stored: str, wanted: str, served: str) -> None:
    assert resolved(replace(ARCHITECTURE, dtype=stored), dtype=wanted).model.dtype == served


def test_limits_follow_one_another() -> None:
    assert resolved(max_num_batched_tokens=10).scheduler.max_num_seqs == 10
    assert resolved(enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 4096
    assert resolved(max_model_len=100, enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 2048


def test_replicas_on_several_machines() -> None:
    several = {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 1}
    args = EngineArgs(**several, data_parallel_address="10.0.0.1")
    assert (args.replicas, args.served_replicas, args.routes_by_prefix) == (range(1, 3), range(4), True)
    parallel = resolved(**several, data_parallel_address="10.0.0.1").parallel
    assert (parallel.replicas, parallel.served) == ((1, 2), (0, 1, 2, 3))
    assert [place.num_local_ranks for place in parallel.places] == [2]
    # vLLM's commands for several servers have the address, too
    for alone in ({"data_parallel_hybrid_lb": True, **several}, {"data_parallel_size": 4, "data_parallel_rank": 1}):
        args = EngineArgs(**alone, data_parallel_address="10.0.0.1", data_parallel_rpc_port=13345)
        assert args.served_replicas == args.replicas and 1 in args.replicas


def test_the_fingerprint_names_the_folder_only_on_one_machine() -> None:
    def fingerprint(folder: str, **arguments: Any) -> str:
        return resolve(
            EngineArgs(**arguments),
            folder=Path(folder),
            architecture=ARCHITECTURE,
            machine=MACHINE,
            timeout_seconds=60.0,
        ).model.fingerprint

    several: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "h"}
    assert fingerprint("a") != fingerprint("b")
    assert fingerprint("a", **several) == fingerprint("b", **several)
    assert fingerprint("a", **several, dtype="float32") != fingerprint("a", **several)


def steps_in_flight(num_stages: int, **arguments: Any) -> tuple[int, int]:
    """(depth, stagger)"""
    four_layers = replace(ARCHITECTURE, layers=ARCHITECTURE.layers[:1] * 4)
    config = resolved(four_layers, pipeline_parallel_size=num_stages, **arguments)
    return config.scheduler.depth, config.scheduler.stagger


def test_a_measured_stagger_has_room() -> None:
    """`engine.pipeline_tuning` chooses it, where the user and an engine that must not go by a clock do not."""
    four_layers = replace(ARCHITECTURE, layers=ARCHITECTURE.layers[:1] * 4)

    def limits(**arguments: Any) -> tuple[int | None, int]:
        scheduler = resolved(four_layers, pipeline_parallel_size=2, **arguments).scheduler
        return scheduler.max_stagger, scheduler.max_depth

    assert limits() == (6, 7)
    assert limits(pipeline_depth=5) == (4, 5)
    assert limits(pipeline_depth=9) == (6, 9)
    assert limits(pipeline_stagger=3) == (None, 4)
    assert limits(distributed_executor_backend="external_launcher") == (None, 3)
    assert (resolved().scheduler.max_stagger, resolved().scheduler.max_depth) == (None, DEFAULT_DEPTH)


def test_steps_in_flight() -> None:
    assert steps_in_flight(1) == (DEFAULT_DEPTH, 1)
    assert steps_in_flight(1, async_scheduling=True) == (2, 1)
    assert steps_in_flight(1, async_scheduling=False) == (1, 1)
    assert steps_in_flight(2) == steps_in_flight(2, async_scheduling=True) == (3, 2)
    assert steps_in_flight(4) == (5, 4)
    assert steps_in_flight(2, pipeline_stagger=3) == (4, 3)
    assert steps_in_flight(2, pipeline_depth=7) == (7, 2)
    assert steps_in_flight(4, pipeline_stagger=6, pipeline_depth=7) == (7, 6)


@pytest.mark.parametrize(
    ("num_stages", "arguments", "message"),
    [
        (1, {"pipeline_depth": 2}, "async_scheduling decides"),
        (1, {"pipeline_stagger": 1}, "pipeline_stagger=1 is for pipeline_parallel_size > 1"),
        (2, {"async_scheduling": False}, "async_scheduling=False"),
        (3, {"pipeline_stagger": 2}, "pipeline_stagger=2 is less than pipeline_parallel_size=3"),
        (2, {"pipeline_depth": 2}, "pipeline_depth=2 is not more than pipeline_stagger=2"),
        (2, {"pipeline_stagger": 4, "pipeline_depth": 4}, "pipeline_depth=4"),
    ],
)
def test_steps_in_flight_that_do_not_fit_the_stages(num_stages: int, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        steps_in_flight(num_stages, **arguments)
    assert re.search(WHAT_TO_DO, str(caught.value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "bfloat16, float32"),
        ({"max_model_len": 4097}, "4096 positions"),
        ({"max_num_seqs": 20, "max_num_batched_tokens": 10}, "max_num_seqs=20"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, "max_model_len=4096"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(**arguments)
    assert re.search(WHAT_TO_DO, str(caught.value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"load_format": "pt"}, "load_format"),
        ({"block_size": 0}, "block_size=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"seed": -1}, "seed=-1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
        ({"async_scheduling": 1}, "async_scheduling=1"),
        ({"pipeline_depth": 0}, "pipeline_depth=0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0"),
        ({"pipeline_layer_partition": (1, 1)}, "pipeline_layer_partition"),
        ({"node_rank": 1}, "inflight worker"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 2},
            "data_parallel_rank=2: this machine's last replica would have number 2, but data_parallel_size=2 allows 0 to 1;",
        ),
        ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True}, "give data_parallel_size_local"),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 1},
            "data_parallel_size_local=1 without .*give data_parallel_hybrid_lb or data_parallel_address, or leave",
        ),
        (
            {"data_parallel_size": 3, "data_parallel_size_local": 2, "data_parallel_start_rank": 1},
            "data_parallel_start_rank=1 without .*or leave data_parallel_start_rank out",
        ),
        ({"data_parallel_size_local": 2}, "data_parallel_size_local=2: .* lower it, or raise data_parallel_size"),
        (
            {"data_parallel_size": 2, "data_parallel_external_lb": True, "data_parallel_hybrid_lb": True},
            "one replica, or several; leave one of them out",
        ),
        (
            {"data_parallel_size": 65, "data_parallel_size_local": 1, "data_parallel_address": "10.0.0.1"},
            "data_parallel_size=65: one server has at most 64 replicas; lower it",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_start_rank": 1, "data_parallel_address": "10.0.0.1"},
            "data_parallel_start_rank=1: .*data_parallel_size=2 allows 0 to 1; lower it",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "h", "nnodes": 2},
            "data_parallel_size=2 with nnodes=2: .*leave one of the two options out",
        ),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, "external_lb=True: give data_parallel_rank"),
        ({"data_parallel_size": 65}, "data_parallel_size=65: one server has at most 64 replicas; lower it"),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend='ray' is not one of 'mp'"),
        (
            {"structured_outputs_backend": "lark"},
            "structured_outputs_backend='lark' is not one of 'llguidance', .*; give one",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_start_rank": 1},
            "data_parallel_rank=0 with data_parallel_start_rank=1: a server with a rank has one replica; leave",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_hybrid_lb": True, "data_parallel_rank": 1},
            "data_parallel_rank=1 with data_parallel_hybrid_lb=True: a server with a rank has one replica; leave",
        ),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_hybrid_lb": True,
                "data_parallel_size_local": 2,
                "data_parallel_start_rank": 3,
            },
            "data_parallel_start_rank=3: this machine's last replica would have number 4, but data_parallel_size=4 allows",
        ),
        ({"nnodes": 2, "distributed_executor_backend": "uni"}, "threads run on one node"),
        ({"nnodes": 2, "distributed_executor_backend": "external_launcher"}, "give --nnodes to torchrun"),
        ({"nnodes": 2, "distributed_executor_backend": "ray"}, "Ray chooses the machines"),
        ({"master_port": 65536}, "master_port=65536"),
        ({"distributed_executor_backend": "rays"}, "not one of uni, mp, ray, external_launcher"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True is not a number"),
        ({"reasoning_end": 3}, "reasoning_end=3"),
        ({"target_inter_token_latency": "fast"}, "'fast' must be auto, none or a number of milliseconds"),
        ({"target_inter_token_latency": -1}, "target_inter_token_latency=-1"),
        ({"target_inter_token_latency": float("nan")}, "target_inter_token_latency=nan"),
        ({"target_inter_token_latency": True}, "target_inter_token_latency=True"),
        ({"max_step_time": "auto"}, "max_step_time='auto' must be none"),
        ({"max_step_time": 0}, "max_step_time=0"),
        ({"max_step_time": MAX_MILLISECONDS + 1}, "max_step_time=3600001"),
        ({"target_inter_token_latency": 50, "distributed_executor_backend": "external_launcher"}, "the same plans"),
        ({"target_inter_token_latency": 50, "enable_chunked_prefill": False}, "cannot be split"),
        ({"max_num_partial_prefills": 2, "max_long_partial_prefills": 3}, "max_long_partial_prefills=3 is more than"),
    ],
)
def test_bounds_of_the_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineArgs(**arguments)
    assert re.search(WHAT_TO_DO, str(caught.value))


def test_the_longest_time_that_is_allowed() -> None:
    assert EngineArgs(max_step_time=MAX_MILLISECONDS).max_step_time == MAX_MILLISECONDS


def test_the_time_of_a_step() -> None:
    scheduler = resolved().scheduler
    assert (scheduler.target_seconds, scheduler.max_step_seconds, scheduler.long_prefill_token_threshold) == (
        None,
        1,
        256,
    )
    scheduler = resolved(target_inter_token_latency=250, max_step_time="none").scheduler
    assert (scheduler.target_seconds, scheduler.max_step_seconds) == (0.25, math.inf)
    for without in ({"target_inter_token_latency": "none", "max_step_time": "none"}, {"enable_chunked_prefill": False}):
        assert not resolved(**without).scheduler.limits_time
    assert not resolved(distributed_executor_backend="external_launcher").scheduler.limits_time


def test_ranks_are_processes_if_there_are_many() -> None:
    assert resolved().parallel.distributed_executor_backend == "uni"
    assert resolved(tensor_parallel_size=2).parallel.distributed_executor_backend == "mp"
    launched = resolved(tensor_parallel_size=2, distributed_executor_backend="external_launcher").parallel
    assert launched.distributed_executor_backend == "external_launcher"
    assert resolved(distributed_executor_backend="mp").parallel.distributed_executor_backend == "mp"


def test_the_ranks_of_a_node_share_its_cores() -> None:
    assert resolved(tensor_parallel_size=2).device.num_threads == 3
    assert resolved(tensor_parallel_size=4, pipeline_parallel_size=2).device.num_threads == 1
    assert resolved(tensor_parallel_size=4, nnodes=2).device.num_threads == 3
    assert resolved(tensor_parallel_size=2, num_threads=5).device.num_threads == 5


def test_bound_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MACHINE", replace(MACHINE, usable_cores=(0, 1, 4, 5), threads_bind="1,4"))
    assert (resolved().device.threads_bind, resolved().device.num_threads) == ("1,4", 2)
    given = resolved(cpu_threads_bind="0,1|4-5", tensor_parallel_size=2).device
    assert (given.threads_bind, given.num_threads) == ("0,1|4-5", 2)
    assert resolved(cpu_threads_bind="off").device.num_threads == 6
    for bad, message in (("0-2", "core 2, where"), ("nobind", "neither"), (3, "not a text")):
        with pytest.raises(ConfigError, match=message):
            resolved(cpu_threads_bind=bad)
    with pytest.raises(ConfigError, match="make the two numbers equal"):
        resolved(num_threads=3)


def test_ranks_are_split_evenly_over_nodes() -> None:
    assert [list(ranks_of_node(6, 3, node)) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert resolved(tensor_parallel_size=2, nnodes=2, master_port=5).parallel.nnodes == 2
    with pytest.raises(ConfigError, match=r"2 ranks .*nnodes=3"):
        resolved(tensor_parallel_size=2, nnodes=3)
    with pytest.raises(ConfigError, match=r"node_rank=2 is not in \[0, 2\)"):
        ranks_of_node(4, 2, 2)


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'enable_prefix_caching'"):
        EngineArgs.from_kwargs({"enable_prefix_cache": True})
    with pytest.raises(ConfigError, match=r"known are .*model, "):
        EngineArgs.from_kwargs({"zzz": True})


def test_the_fingerprint_tells_models_apart() -> None:
    prints = {
        resolved().model.fingerprint,
        resolved(dtype="float32").model.fingerprint,
        resolved(kv_cache_dtype="int8").model.fingerprint,
        resolved(load_format="dummy").model.fingerprint,
        resolved(load_format="dummy", seed=1).model.fingerprint,
        resolved(replace(ARCHITECTURE, layers=ARCHITECTURE.layers[:1] * 3)).model.fingerprint,
    }
    assert len(prints) == 6
    assert resolved(seed=1, max_num_seqs=3).model.fingerprint == resolved().model.fingerprint
    dummy = resolved(load_format="dummy").model
    assert (dummy.seed, dummy.fingerprint) == (0, resolved(load_format="dummy", seed=0).model.fingerprint)


def test_a_gguf_file_is_its_own_model(tmp_path: Path) -> None:
    def of(name: str, load_format: str = "auto") -> ModelConfig:
        path = tmp_path / name
        path.write_bytes(b"")
        args = EngineArgs(load_format=load_format)
        return resolve(args, folder=path, architecture=ARCHITECTURE, machine=MACHINE, timeout_seconds=60.0).model

    assert of("a.gguf").load_format == of("a.gguf", "gguf").load_format == "gguf"
    assert of("a.gguf", "dummy").load_format == "dummy"
    assert of("a.gguf").fingerprint == of("a.gguf").fingerprint != of("b.gguf").fingerprint
    with pytest.raises(ConfigError, match=r"load_format='safetensors'.*a\.gguf"):
        of("a.gguf", "safetensors")
    with pytest.raises(ConfigError, match=r"load_format='gguf'"):
        resolved(load_format="gguf")


STORED = [
    ("awq", ["awq", "awq_marlin"]),
    ("gptq", ["gptq", "gptq_marlin"]),
    ("gptq_v2", ["gptq", "gptq_marlin"]),
    ("compressed-tensors", ["compressed-tensors"]),
    ("compressed-tensors in fp8", ["compressed-tensors"]),
    ("fbgemm_fp8", ["fbgemm_fp8"]),
    ("fp8", ["fp8"]),
]


@pytest.mark.parametrize(("weight_format", "names"), STORED)
def test_a_quantization_that_the_checkpoint_has_is_accepted(weight_format: str, names: list[str]) -> None:
    """As other engines want it said. It changes nothing: neither what is computed, nor the cache's keys."""
    stored = replace(ARCHITECTURE, weight_format=weight_format)
    without = resolved(stored).model
    for name in sorted(STORED_QUANTIZATIONS.keys() | {*names}):
        if name in names:
            assert resolved(stored, quantization=name).model == without
        else:
            with pytest.raises(ConfigError, match=rf"quantization='{name}'.*{names[0]}"):
                resolved(stored, quantization=name)
    assert resolved(stored, quantization="int8").model.quantization.layers == "int8"  # for what it has as floats


def test_a_quantization_that_the_checkpoint_has_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization='awq'.*'int8' or 'int4'"):
        resolved(quantization="awq")
    path = tmp_path / "a.gguf"
    path.write_bytes(b"")

    def of(name: str) -> QuantizationConfig:
        args = EngineArgs(quantization=name)
        config = resolve(args, folder=path, architecture=ARCHITECTURE, machine=MACHINE, timeout_seconds=60.0)
        return config.model.quantization

    assert of("gguf") == QuantizationConfig()
    with pytest.raises(ConfigError, match=r"quantization='gptq'"):
        of("gptq")


def test_a_wrong_value_says_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(quantization="bnb", max_num_seqs=0)
    assert str(caught.value) == (
        "max_num_seqs=0 is not an integer in [1, 65536]; give one, or leave it out; quantization='bnb' is not one of 'int8', "
        "'int4', 'fp8', 'awq', 'awq_marlin', 'gptq', 'gptq_marlin', 'compressed-tensors', 'fbgemm_fp8', 'mxfp4', 'gguf'; give "
        "one, or leave it out"
    )


@pytest.mark.parametrize("positions", [2**31, 2**40, 2**62])
def test_a_model_without_a_sensible_length_says_which_option_to_lower(positions: int) -> None:
    """It ended in a MemoryError of a rank."""
    architecture = replace(ARCHITECTURE, max_position_embeddings=positions)
    with pytest.raises(ConfigError, match=f"max_model_len={positions} "):
        resolved(architecture)
    assert resolved(architecture, max_model_len=10**7).model.max_model_len == 10**7


def test_threads_follow_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert detect_machine("auto").num_cores == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert 1 <= detect_machine("cpu").num_cores < 100000
    monkeypatch.setenv("OMP_NUM_THREADS", "garbage")
    assert detect_machine("cpu").num_cores >= 1


def test_a_block_of_a_recurrent_model_has_room_for_a_state() -> None:
    recurrence = GatedDeltaSpec(num_key_heads=2, num_value_heads=2, key_dim=64, value_dim=64, kernel_size=4)
    hybrid = replace(
        ARCHITECTURE, layers=(LayerSpec(mixer=recurrence, mlp=GatedMlpSpec(size=128)), *ARCHITECTURE.layers)
    )
    state_bytes = 2 * 64 * 64 * 4 + 3 * 6 * 64 * 2
    for arguments, num_bytes in (({}, 2 * 2 * 16 * 2), ({"kv_cache_dtype": "int8"}, 2 * 2 * (16 + 4))):
        size = resolved(hybrid, **arguments).cache.block_size
        assert size % 16 == 0 and (size - 16) * 2 * num_bytes < state_bytes <= size * 2 * num_bytes
    assert resolved(hybrid, block_size=32, state_checkpoint_tokens=99).cache.block_size == 32
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    cache = resolved(hybrid, speculative_config=drafts).cache
    bytes_per_token = 2 * 2 * 2 * 16 * 2  # of both layers with attention
    assert cache.num_states == 3
    assert 3 * state_bytes <= cache.block_size * bytes_per_token < 3 * state_bytes + 16 * bytes_per_token
    drafts["num_speculative_tokens"] = 32
    with pytest.raises(ConfigError, match=r"^block_size=32 .*33 tokens"):
        resolved(hybrid, block_size=32, speculative_config=drafts)
    assert resolved(block_size=32, speculative_config=drafts).cache.num_states == 1
    unknown = replace(ARCHITECTURE, implementation=TRANSFORMERS)  # which may have recurrent layers
    cache = resolved(unknown, speculative_config=drafts).cache
    assert (cache.num_states, cache.block_size) == (33, 48)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=4 .*2 key heads"):
        resolved(hybrid, tensor_parallel_size=4)
    gpu = Machine(device="cuda", num_cores=6, dtypes=("bfloat16", "float32"))
    with pytest.raises(ConfigError, match="on CPUs only"):
        resolve(EngineArgs(), folder=Path("model"), architecture=hybrid, machine=gpu, timeout_seconds=60.0)


def test_the_kv_cache_has_the_dtype_of_the_model_or_its_own() -> None:
    config = resolved(kv_cache_dtype="int8")
    assert (config.model.dtype, config.cache.dtype) == ("bfloat16", "int8")
    assert resolved(dtype="float32").cache.dtype == "float32"


def test_the_fields_of_generation_config_that_are_replaced() -> None:
    assert resolved().model.generation_overrides == {}
    assert resolved(override_generation_config={"top_k": 3}).model.generation_overrides == {"top_k": 3}
    with pytest.raises(ConfigError, match=r"^override_generation_config='x'"):
        EngineArgs(override_generation_config="x")  # type: ignore[arg-type]
