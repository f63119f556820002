"""What options become on a GPU and on a CPU, and which of them are refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.cuda_driver import Gpu
from inflight.config.device_options import MAX_DEVICE_STATE, check_device_state, check_token_ids
from inflight.config.engine import DeviceConfig, EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.mixers import AttentionSpec, RopeConfig
from inflight.config.resolve import find_conflicts, resolve
from inflight.errors import ConfigError
from tests.unit.config.fake_driver import A100, H200

ARCHITECTURE = ModelArchitecture(
    name="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    layers=(
        LayerSpec(
            mixer=AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=16, rope=RopeConfig()), mlp=GatedMlpSpec(size=128)
        ),
    )
    * 2,
    rms_norm_eps=1e-6,
    max_position_embeddings=16384,
    dtype="float16",
)
CPU = Machine(device="cpu", num_cores=6, dtypes=("bfloat16", "float32"))


def gpus(*found: Gpu) -> Machine:
    return Machine(
        device="cuda",
        num_cores=6,
        dtypes=("bfloat16", "float16", "float32"),
        threads_bind="0-2",  # the environment's: for CPUs, and no obstacle
        gpus=found,
    )


def resolved(machine: Machine, **arguments: Any) -> EngineConfig:
    return resolve(
        EngineArgs(**arguments), folder=Path("m"), architecture=ARCHITECTURE, machine=machine, timeout_seconds=60.0
    )


def test_defaults_on_a_gpu() -> None:
    config = resolved(gpus(H200))
    assert config.device == DeviceConfig(kind="cuda", num_threads=6, threads_bind="off", cuda_graph_max_tokens=512)
    assert (config.model.dtype, config.cache.dtype) == ("float16", "float16")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 8192)
    assert (config.scheduler.depth, config.scheduler.stagger) == (2, 1)
    assert (config.cache.memory_utilization, config.cache.memory_bytes) == (0.9, None)
    assert config.cache.usual_sequence_len is None  # all of what is left becomes the KV cache
    assert config.parallel.distributed_executor_backend == "uni"


def test_defaults_on_a_cpu_are_what_they_were() -> None:
    config = resolved(CPU)
    assert config.device == DeviceConfig(kind="cpu", num_threads=6, threads_bind="auto")
    assert config.device.cuda_graph_max_tokens == 0
    assert (config.scheduler.max_num_batched_tokens, config.cache.memory_utilization) == (2048, 0.5)


@pytest.mark.parametrize(
    ("arguments", "num_tokens"),
    [
        ({}, 512),
        ({"max_num_batched_tokens": 300}, 300),
        ({"cuda_graph_max_tokens": 1000}, 1000),
        ({"cuda_graph_max_tokens": 1000, "max_num_batched_tokens": 700}, 700),
        ({"cuda_graph_max_tokens": 0}, 0),
        ({"enforce_eager": True}, 0),
        ({"enforce_eager": True, "cuda_graph_max_tokens": 0}, 0),
    ],
)
def test_what_is_captured(arguments: dict[str, Any], num_tokens: int) -> None:
    device = resolved(gpus(H200), **arguments).device
    assert (device.cuda_graph_max_tokens, device.enforce_eager) == (num_tokens, "enforce_eager" in arguments)


def test_fewer_bits_on_a_gpu() -> None:
    config = resolved(gpus(H200), quantization="fp8", kv_cache_dtype="fp8")
    assert (config.cache.dtype, config.model.quantization.layers) == ("float8_e4m3fn", "fp8")
    assert config.model.quantization.head == "int8"
    assert resolved(gpus(H200), quantization="fp8", head_quantization="fp8").model.quantization.head == "fp8"
    for name in ("int8", "int4"):
        assert resolved(gpus(A100), quantization=name).model.quantization.layers == name
    assert resolved(CPU, quantization="int4").model.quantization.head == "int8"


def test_the_fingerprint_tells_caches_apart() -> None:
    prints = {resolved(gpus(H200), **more).model.fingerprint for more in ({}, {"kv_cache_dtype": "fp8"})}
    assert len(prints) == 2


def test_ranks_on_gpus() -> None:
    config = resolved(gpus(H200, H200), tensor_parallel_size=2)
    assert config.parallel.distributed_executor_backend == "mp"
    assert config.device.num_threads == 3
    places = resolved(gpus(H200, H200), tensor_parallel_size=4, nnodes=2).parallel.places
    assert [place.device_index for place in places] == [0, 1, 0, 1]
    # the launcher knows how many of its ranks are on this machine
    launched = resolved(gpus(H200), tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    assert launched.device.kind == "cuda"


def test_the_attention_backend_of_a_gpu_may_be_named() -> None:
    assert resolved(gpus(H200), attention_backend="triton") == resolved(gpus(H200))


def test_a_cpu_has_no_graphs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Most command lines for vLLM have --enforce-eager."""
    with caplog.at_level(logging.INFO):
        assert resolved(CPU, enforce_eager=True, cuda_graph_max_tokens=0) == resolved(CPU)
    assert "enforce_eager has no effect on a CPU" in caplog.text


def test_drafts_on_a_gpu() -> None:
    assert resolved(gpus(H200), speculative_config={"method": "ngram"}).speculative is not None


REFUSED: list[tuple[Machine, dict[str, Any], str]] = [
    (CPU, {"attention_backend": "triton"}, "attention_backend='triton' is for GPUs"),
    (CPU, {"cuda_graph_max_tokens": 8}, "cuda_graph_max_tokens=8 is for GPUs"),
    (CPU, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not for device='cpu'; give 'auto' or 'int8'"),
    (CPU, {"quantization": "fp8"}, "quantization='fp8' is not for device='cpu'; give 'int8' or 'int4'"),
    (CPU, {"head_quantization": "fp8"}, "head_quantization='fp8' is not for device='cpu'"),
    (gpus(H200), {"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not for device='cuda'; give 'auto' or 'fp8'"),
    (gpus(A100), {"quantization": "fp8"}, r"quantization='fp8' needs .* 8\.9 .* this machine has 8\.0"),
    (gpus(A100), {"head_quantization": "fp8"}, r"head_quantization='fp8' needs .* 8\.9"),
    (gpus(H200, A100), {"kv_cache_dtype": "fp8"}, r"kv_cache_dtype='fp8' needs .* 8\.9 .* this machine has 8\.0"),
    (gpus(H200), {"num_threads": 4}, "num_threads=4 is for CPUs"),
    (gpus(H200), {"cpu_threads_bind": "off"}, "cpu_threads_bind='off' is for CPUs"),
    (
        gpus(H200),
        {"batch_invariant": True},
        "batch_invariant=True cannot be kept on a GPU yet: the order in which cuBLAS",
    ),
    (
        gpus(H200, H200),
        {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
        "'uni' runs 2 ranks as threads of one process",
    ),
    (
        gpus(H200),
        {"tensor_parallel_size": 2},
        "tensor_parallel_size=2 x pipeline_parallel_size=1 needs 2 GPUs on this machine, one for each rank, and 1 can be used",
    ),
    (gpus(H200), {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "needs 2 GPUs"),
    (
        gpus(H200, H200),
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        "tensor_parallel_size=2 x pipeline_parallel_size=1 x 2 replicas needs 4 GPUs on this machine",
    ),
]


@pytest.mark.parametrize(("machine", "arguments", "message"), REFUSED)
def test_what_the_device_does_not_know_is_refused(machine: Machine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(machine, **arguments)
    args = EngineArgs(**arguments)
    found = find_conflicts(args, folder=Path("m"), architecture=ARCHITECTURE, machine=machine)
    assert found == [str(caught.value)]


def test_no_conflict_is_found_where_there_is_none() -> None:
    args = EngineArgs(
        quantization="fp8",
        kv_cache_dtype="fp8",
        cuda_graph_max_tokens=4000,
        max_num_batched_tokens=5000,
        max_num_seqs=300,
    )
    assert find_conflicts(args, folder=Path("m"), architecture=ARCHITECTURE, machine=gpus(H200)) == []


def test_all_conflicts_are_found() -> None:
    args = EngineArgs(quantization="fp8", kv_cache_dtype="int8", num_threads=3)
    found = find_conflicts(args, folder=Path("m"), architecture=ARCHITECTURE, machine=gpus(A100))
    assert [text.partition("=")[0] for text in found] == ["num_threads", "quantization", "kv_cache_dtype"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "gpu"}, "device='gpu' is not one of 'auto', 'cpu', 'cuda'; give one, or leave it out"),
        ({"attention_backend": "flashinfer"}, "'auto', 'triton'"),
        ({"enforce_eager": 1}, "enforce_eager=1 is not True or False"),
        ({"cuda_graph_max_tokens": -1}, "cuda_graph_max_tokens=-1"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "'auto', 'int8', 'fp8'"),
        ({"enforce_eager": True, "cuda_graph_max_tokens": 5}, "leave one of them out"),
    ],
)
def test_values_that_there_are_not(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**arguments)


def test_a_float16_model_on_a_machine_without_it() -> None:
    assert resolved(CPU).model.dtype == "bfloat16"
    assert resolved(replace(gpus(H200), dtypes=("float32",))).model.dtype == "float32"


def test_slots_of_more_tokens_than_a_gpu_can_find_are_refused() -> None:
    """The tokens of 32,767 requests and one more slot, 65,536 each, are 2**31 numbers."""
    long = replace(ARCHITECTURE, max_position_embeddings=65_536)
    many = EngineArgs(max_num_seqs=32_767, max_num_batched_tokens=32_767)

    def resolve_on(machine: Machine, args: EngineArgs) -> EngineConfig:
        return resolve(args, folder=Path("m"), architecture=long, machine=machine, timeout_seconds=60.0)

    with pytest.raises(ConfigError, match=r"^max_num_seqs=32767 .*max_model_len=65536 "):
        resolve_on(gpus(H200), many)
    conflicts = find_conflicts(many, folder=Path("m"), architecture=long, machine=gpus(H200))
    assert len(conflicts) == 1 and "max_model_len=65536" in conflicts[0]
    assert resolve_on(gpus(H200), replace(many, max_model_len=32_768)).scheduler.max_num_seqs == 32_767
    assert resolve_on(CPU, many).scheduler.max_num_seqs == 32_767


def test_the_largest_state_of_a_device_that_is_allowed() -> None:
    sizes = {"max_num_seqs": 2**16, "max_model_len": 2**16}
    check_token_ids(**sizes)
    check_device_state(MAX_DEVICE_STATE, **sizes)
    with pytest.raises(ConfigError, match="more token ids"):
        check_token_ids(max_num_seqs=2**16 + 1, max_model_len=2**16)
    with pytest.raises(ConfigError, match="2147483648 numbers"):
        check_device_state(MAX_DEVICE_STATE + 1, **sizes)
