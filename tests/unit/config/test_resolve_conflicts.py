"""`resolve` and `find_conflicts`: where each argument goes, and that each conflict is found by both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.config.architecture import TRANSFORMERS, GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.mixers import AttentionSpec, GatedDeltaSpec, LatentAttentionSpec, RopeConfig
from inflight.config.resolve import find_conflicts, resolve
from inflight.errors import ConfigError
from tests.unit.config.fake_driver import H200
from tests.unit.config.test_resolve import ARCHITECTURE, MACHINE, resolved

GPU = Machine(device="cuda", num_cores=6, dtypes=("bfloat16", "float16", "float32"), gpus=(H200,) * 4)
UNKNOWN = replace(ARCHITECTURE, implementation=TRANSFORMERS)
MLP = GatedMlpSpec(size=128)
DELTA = GatedDeltaSpec(num_key_heads=2, num_value_heads=2, key_dim=64, value_dim=64, kernel_size=4)
RECURRENT = replace(ARCHITECTURE, layers=(LayerSpec(mixer=DELTA, mlp=MLP), *ARCHITECTURE.layers))
LATENT_ATTENTION = LatentAttentionSpec(
    num_heads=4, head_dim=40, rope=None, rank=32, query_rank=None, nope_dim=8, rope_dim=8, value_dim=8
)
LATENT = replace(ARCHITECTURE, layers=(LayerSpec(mixer=LATENT_ATTENTION, mlp=MLP),))
LONG = replace(ARCHITECTURE, max_position_embeddings=2**20)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def on(machine: Machine, architecture: ModelArchitecture = ARCHITECTURE, **arguments: Any) -> EngineConfig:
    args = EngineArgs(**arguments)
    return resolve(args, folder=Path("model"), architecture=architecture, machine=machine, timeout_seconds=7.0)


def test_arguments_that_go_to_their_places_as_they_are() -> None:
    config = on(
        MACHINE,
        model="m",
        seed=5,
        hf_overrides={"vocab_size": 100},
        trust_remote_code=True,
        batch_invariant=True,
        quantization="int4",
        quantization_group_size=32,
        head_quantization="int4",
        scheduling_policy="priority",
        max_num_partial_prefills=6,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=33,
        state_checkpoint_tokens=99,
        reasoning_end="</think>",
        master_addr="10.0.0.1",
        master_port=77,
        kv_events_config={"enable_kv_cache_events": True},
        kv_offloading_size=1,
        fault_tolerance_config={"max_recoveries": 3},
    )
    model, scheduler, parallel = config.model, config.scheduler, config.parallel
    assert (model.name, model.seed, model.batch_invariant, model.trust_remote_code) == ("m", 5, True, True)
    assert (model.folder, model.config_overrides) == (Path("model"), {"vocab_size": 100})
    assert vars(model.quantization) == {"layers": "int4", "head": "int4", "group_size": 32}
    assert (scheduler.policy, scheduler.max_num_partial_prefills, scheduler.max_long_partial_prefills) == (
        "priority",
        6,
        2,
    )
    assert scheduler.long_prefill_token_threshold == 33
    assert (parallel.master_addr, parallel.master_port) == ("10.0.0.1", 77)
    assert (config.cache.state_checkpoint_tokens, config.cache.enable_prefix_caching) == (99, True)
    assert config.cache.events is not None and config.cache.transfer is not None
    assert (config.reasoning_end, config.execute_model_timeout_seconds) == ("</think>", 7.0)
    assert (config.fault_tolerance.max_recoveries, config.fault_tolerance.enabled) == (3, True)


def test_without_these_arguments() -> None:
    config = on(MACHINE, enable_prefix_caching=False, enable_fault_tolerance=False)
    model = config.model
    assert (model.name, model.seed, model.batch_invariant, model.trust_remote_code) == ("embedded", 0, False, False)
    assert (model.config_overrides, config.speculative) == ({}, None)
    assert not config.cache.enable_prefix_caching and not config.fault_tolerance.enabled
    assert config.cache.events is None and config.cache.transfer is None
    assert not config.parallel.routes_by_prefix


def test_replicas_have_an_index_each() -> None:
    config = on(MACHINE, data_parallel_size=3)
    assert config.parallel.routes_by_prefix
    assert [each.parallel.replica_index for each in config.replicas()] == [0, 1, 2]
    assert [replace(each, parallel=config.parallel) for each in config.replicas()] == [config] * 3
    assert config.device.num_threads == 2  # of six cores


@pytest.mark.parametrize(("length", "threshold"), [(6400, 256), (6425, 257), (100_000, 4000)])
def test_a_long_prompt_has_more_than_a_share_of_the_longest(length: int, threshold: int) -> None:
    assert on(MACHINE, LONG, max_model_len=length).scheduler.long_prefill_token_threshold == threshold


def test_limits_that_just_fit() -> None:
    scheduler = on(MACHINE, enable_chunked_prefill=False, max_num_batched_tokens=4096).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.enable_chunked_prefill) == (4096, False)
    assert on(MACHINE, max_num_seqs=10, max_num_batched_tokens=10).scheduler.max_num_seqs == 10
    assert on(MACHINE, max_model_len=4096).model.max_model_len == 4096
    assert on(MACHINE, speculative_config=NGRAM, block_size=1).cache.num_states == 1
    assert on(MACHINE, RECURRENT, speculative_config=NGRAM, block_size=5).cache.num_states == 5


@pytest.mark.parametrize(
    ("machine", "checkpoint", "dtype"),
    [
        (MACHINE, "bfloat16", "bfloat16"),
        (replace(MACHINE, dtypes=("float32",)), "bfloat16", "float32"),
        (replace(MACHINE, dtypes=("bfloat16",)), "float32", "float32"),  # which has no equal of half the size
    ],
)
def test_the_dtype_of_a_checkpoint(machine: Machine, checkpoint: str, dtype: str) -> None:
    assert on(machine, replace(ARCHITECTURE, dtype=checkpoint)).model.dtype == dtype


def test_a_latent_vector_is_one_row_for_keys_and_values() -> None:
    hybrid = replace(LATENT, layers=(*LATENT.layers, LayerSpec(mixer=DELTA, mlp=MLP)))
    state_bytes = DELTA.state_bytes(2, 1)
    assert state_bytes == 2 * 64 * 64 * 4 + 3 * 6 * 64 * 2
    assert on(MACHINE, hybrid).cache.block_size == -(-state_bytes // (40 * 2) // 16) * 16
    wide = on(MACHINE, RECURRENT, dtype="float32").cache.block_size
    assert wide == -(-DELTA.state_bytes(4, 1) // (2 * 2 * 2 * 16 * 4) // 16) * 16


def test_only_transformers_reads_other_overrides() -> None:
    """What Inflight's own code makes of them is in the architecture."""

    def prints(architecture: ModelArchitecture) -> int:
        given: list[dict[str, Any]] = [{}, {"hf_overrides": {"a": 1}}, {"hf_overrides": {"a": 2}}]
        return len({on(MACHINE, architecture, **each).model.fingerprint for each in given})

    assert (prints(ARCHITECTURE), prints(UNKNOWN)) == (1, 3)
    assert on(MACHINE, quantization="int8").model.fingerprint != on(MACHINE).model.fingerprint


def test_tiers_may_be_shared_by_machines_where_the_folder_has_another_name() -> None:
    def fingerprint(folder: str, *tiers: dict[str, str]) -> str:
        given = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1e9, "secondary_tiers": list(tiers)}}
        args = EngineArgs(kv_transfer_config=given)
        config = resolve(args, folder=Path(folder), architecture=ARCHITECTURE, machine=MACHINE, timeout_seconds=60.0)
        return config.model.fingerprint

    tier = {"type": "fs", "path": "/mnt/kv"}
    assert fingerprint("a", tier) == fingerprint("b", tier)
    assert fingerprint("a") != fingerprint("b")


def test_a_gpu_limits_the_token_ids_of_all_requests_unless_there_are_drafts() -> None:
    many = {"max_num_seqs": 4095, "max_num_batched_tokens": 4095}
    fits = 2**19 - 2**15  # 4,096 slots of so many tokens, and blocks of 16 and 1
    assert on(GPU, LONG, **many, max_model_len=fits).model.max_model_len == fits
    with pytest.raises(ConfigError, match="lower one of the two"):
        on(GPU, LONG, **many, max_model_len=fits, block_size=1)
    with pytest.raises(ConfigError, match=r"max_num_seqs=4095 .*max_model_len=524288 "):
        on(GPU, LONG, **many, max_model_len=2**19)
    assert on(GPU, LONG, **many, max_model_len=2**19, speculative_config=NGRAM).speculative is not None


CONFLICTS: list[tuple[Machine, ModelArchitecture, dict[str, Any], str]] = [
    (
        MACHINE,
        UNKNOWN,
        {"batch_invariant": True},
        "by transformers, which does not go with batch_invariant=True; leave",
    ),
    (MACHINE, UNKNOWN, {"tensor_parallel_size": 4}, "tensor_parallel_size=4 and 2 key/value heads; leave it out"),
    (
        MACHINE,
        replace(UNKNOWN, not_native="it has x"),
        {"batch_invariant": True},
        "does not go with batch_invariant=True; .*: it has x",
    ),
    (
        GPU,
        LATENT,
        {},
        "has latent attention, which runs on CPUs only .* use device='cpu', or model_impl='transformers'",
    ),
    (GPU, RECURRENT, {}, "has recurrent layers, which run on CPUs only so far; use device='cpu'"),
    (MACHINE, ARCHITECTURE, {"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the model"),
    (MACHINE, ARCHITECTURE, {"dtype": "float16"}, "dtype='float16' is not supported on this cpu; use one of bfloat16"),
    (MACHINE, ARCHITECTURE, {"max_model_len": 4097}, "max_model_len=4097 is more than the model's own limit of 4096"),
    (MACHINE, ARCHITECTURE, {"load_format": "gguf"}, "load_format='gguf', but model holds safetensors"),
    (MACHINE, ARCHITECTURE, {"nnodes": 2}, "1 ranks .* cannot be split evenly over nnodes=2"),
    (MACHINE, ARCHITECTURE, {"pipeline_parallel_size": 3}, "pipeline_parallel_size=3, but the model has 2 layers"),
    (MACHINE, ARCHITECTURE, {"max_num_batched_tokens": 9, "max_num_seqs": 10}, "max_num_batched_tokens=9 is less than"),
    (MACHINE, replace(LONG, max_position_embeddings=2**24 + 1), {}, "are more token ids than a rank keeps"),
    (MACHINE, ARCHITECTURE, {"pipeline_depth": 3}, "pipeline_depth=3 is for pipeline_parallel_size > 1; leave it out"),
    (MACHINE, ARCHITECTURE, {"speculative_config": {"method": "medusa"}}, "speculative_config: method='medusa'"),
    (MACHINE, ARCHITECTURE, {"speculative_config": {"method": "eagle"}}, "eagle needs a `model`"),
    (MACHINE, ARCHITECTURE, {"kv_events_config": {"endpont": 1}}, "kv_events_config has no 'endpont'"),
    (
        MACHINE,
        ARCHITECTURE,
        {"kv_events_config": {"enable_kv_cache_events": True}, "enable_prefix_caching": False},
        "kv_events_config with enable_prefix_caching=False",
    ),
    (MACHINE, ARCHITECTURE, {"kv_transfer_config": {}}, "kv_transfer_config: no host memory is given"),
    (
        MACHINE,
        ARCHITECTURE,
        {"fault_tolerance_config": {"recoveries": 1}},
        "fault_tolerance_config has no 'recoveries'",
    ),
    (MACHINE, ARCHITECTURE, {"head_quantization": "fp8"}, "head_quantization='fp8' is not for device='cpu'"),
    (MACHINE, ARCHITECTURE, {"quantization": "awq"}, "quantization='awq', but the weights .* are not quantized"),
    (
        GPU,
        replace(ARCHITECTURE, layers=ARCHITECTURE.layers * 2),
        {"tensor_parallel_size": 2, "data_parallel_size": 3},
        "x 3 replicas needs 6 GPUs on this machine, one for each rank, and 4 can be used",
    ),
]


@pytest.mark.parametrize(("machine", "architecture", "arguments", "message"), CONFLICTS)
def test_one_conflict(
    machine: Machine, architecture: ModelArchitecture, arguments: dict[str, Any], message: str
) -> None:
    found = find_conflicts(EngineArgs(**arguments), folder=Path("model"), architecture=architecture, machine=machine)
    with pytest.raises(ConfigError, match=message) as caught:
        on(machine, architecture, **arguments)
    assert found == [str(caught.value)]


@pytest.mark.parametrize(
    ("machine", "architecture", "arguments"),
    [
        (MACHINE, LATENT, {}),
        (MACHINE, RECURRENT, {}),
        (MACHINE, UNKNOWN, {"tensor_parallel_size": 2}),
        (MACHINE, replace(LONG, max_position_embeddings=2**24), {}),
        (GPU, ARCHITECTURE, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        (GPU, ARCHITECTURE, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "nnodes": 2}),
    ],
)
def test_no_conflict(machine: Machine, architecture: ModelArchitecture, arguments: dict[str, Any]) -> None:
    args = EngineArgs(**arguments)
    assert find_conflicts(args, folder=Path("model"), architecture=architecture, machine=machine) == []
    on(machine, architecture, **arguments)


def test_transformers_reads_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="GGUF file"):
        resolve(EngineArgs(), folder=path, architecture=UNKNOWN, machine=MACHINE, timeout_seconds=60.0)
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    config = resolve(EngineArgs(), folder=folder, architecture=UNKNOWN, machine=MACHINE, timeout_seconds=60.0)
    assert config.model.load_format == "safetensors"


def test_a_conflict_of_two_parts_is_named_once() -> None:
    """The number of batched tokens depends on the longest sequence, which is wrong, too."""
    args = EngineArgs(max_model_len=5000, max_num_batched_tokens=4500, enable_chunked_prefill=False, pipeline_depth=2)
    found = find_conflicts(args, folder=Path("model"), architecture=ARCHITECTURE, machine=MACHINE)
    assert [text.partition("=")[0] for text in found] == [
        "max_model_len",
        "without chunked prefill a prompt must fit one step: max_num_batched_tokens",
        "pipeline_depth",
    ]


@pytest.mark.parametrize(
    ("layers", "head", "expected"),
    [
        (None, "auto", (None, None)),
        ("int8", "auto", ("int8", "int8")),
        ("int4", "none", ("int4", None)),
        (None, "int8", (None, "int8")),
        ("int8", "int4", ("int8", "int4")),
    ],
)
def test_quantization_of_layers_and_head(
    layers: str | None, head: str, expected: tuple[str | None, str | None]
) -> None:
    found = resolved(quantization=layers, head_quantization=head).model.quantization
    assert (found.layers, found.head) == expected


def test_a_rope_with_long_factors() -> None:
    rope = RopeConfig(kind="longrope", original_max_position_embeddings=40, factors=(1.0,), long_factors=(2.0,))
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=rope)
    longrope = replace(ARCHITECTURE, layers=(LayerSpec(mixer=attention, mlp=MLP),))
    for arguments, length, factors in (({}, 40, (1.0,)), ({"max_model_len": 41}, 41, (2.0,))):
        model = on(MACHINE, longrope, **arguments).model
        (found,) = model.architecture.attentions
        assert found.rope is not None and (model.max_model_len, found.rope.factors) == (length, factors)


def test_every_rank_of_a_node_needs_cores_that_it_may_use() -> None:
    machine = replace(MACHINE, usable_cores=(0, 1, 4, 5))
    assert on(machine, tensor_parallel_size=2, cpu_threads_bind="0,1|4,5", num_threads=2).device.num_threads == 2
    with pytest.raises(ConfigError, match="core 9"):
        on(machine, tensor_parallel_size=2, cpu_threads_bind="0,1|4,9")
    with pytest.raises(ConfigError, match="gives a rank 2 cores, but num_threads=1"):
        on(machine, tensor_parallel_size=2, cpu_threads_bind="0,1|4,5", num_threads=1)
