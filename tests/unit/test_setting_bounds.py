"""The bounds of every setting that is a number: as a table, so that none changes unnoticed."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import inflight.config
from inflight.config.engine_args import EngineArgs
from inflight.config.eplb import EplbConfig
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.config.image_args import ImageArgs
from inflight.config.kv_events import KVEventsConfig
from inflight.config.kv_tiers import KVTierConfig
from inflight.config.kv_transfer import _Extra
from inflight.config.speculative import SpeculativeConfig
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.setting import Setting, settings_of

M, G, WEEK, INT32 = 2**20, 2**30, 604_800, 2**31 - 1

_OF_IMAGES = {"mm_processor_cache_gb": (0, M), "mm_processor_workers": (1, 256)}

BOUNDS: dict[type, dict[str, tuple[float, float]]] = {
    _Extra: {"cpu_bytes_to_use": (0, 2**50)},
    KVTierConfig: {
        "max_bytes": (0, 2**60),
        "blocks_per_chunk": (1, 64),
        "ttl_seconds": (0, INT32),
        "timeout_seconds": (0, 600),
        "max_operations": (1, 1024),
    },
    SpeculativeConfig: {
        "num_speculative_tokens": (1, 64),
        "prompt_lookup_min": (1, 32),
        "prompt_lookup_max": (1, 32),
        "suffix_decoding_max_tree_depth": (3, 64),
        "suffix_decoding_max_cached_requests": (0, INT32),
        "suffix_decoding_max_spec_factor": (0, 64),
        "suffix_decoding_min_token_prob": (0, 1),
    },
    KVEventsConfig: {"buffer_steps": (1, M), "hwm": (1, G), "max_queue_size": (1, G)},
    ImageArgs: _OF_IMAGES,
    EngineArgs: {
        **_OF_IMAGES,
        "seed": (0, 2**63 - 1),
        "max_model_len": (1, 16 * M),
        "max_num_seqs": (1, 65536),
        "max_num_batched_tokens": (1, 16 * M),
        "block_size": (1, 4096),
        "kv_cache_memory_bytes": (1, 2**60),
        "gpu_memory_utilization": (0, 1),
        "weight_cache_gb": (0, M),
        "state_checkpoint_tokens": (1, M),
        "reasoning_budget": (-1, 2**31 - 1),
        "kv_offloading_size": (0, M),
        "max_num_partial_prefills": (1, 65536),
        "max_long_partial_prefills": (1, 65536),
        "long_prefill_token_threshold": (0, 16 * M),
        "cuda_graph_max_tokens": (0, 16 * M),
        "num_threads": (1, 4096),
        "tensor_parallel_size": (1, 65536),
        "pipeline_parallel_size": (1, 65536),
        "data_parallel_size": (1, 4096),
        "data_parallel_rank": (0, 4095),
        "data_parallel_size_local": (1, 64),
        "data_parallel_start_rank": (0, 4095),
        "data_parallel_rpc_port": (1, 65535),
        "pipeline_stagger": (1, 65536),
        "pipeline_depth": (1, 65537),
        "nnodes": (1, 65536),
        "node_rank": (0, 65535),
        "master_port": (1, 65535),
    },
    EplbConfig: {"window_size": (1, INT32), "step_interval": (1, INT32), "num_redundant_experts": (1, 65536)},
    FaultToleranceConfig: {
        "engine_recovery_timeout_sec": (0, 86400),
        "max_recoveries": (0, 65536),
        "spare_workers": (0, 64),
    },
    ServerSettings: {
        "port": (0, 65535),
        "backlog": (1, 65535),
        "api_server_count": (1, 64),
        "response_store_bytes": (2**16, 2**44),
        "response_store_seconds": (1, 10 * 366 * 86400),
        "shutdown_timeout": (0, WEEK),
        "keep_alive_timeout": (0.001, WEEK),
        "log_stats_interval": (0, WEEK),
        "max_queued_requests": (1, M),
        "max_queued_tokens": (1, 2**40),
        "request_timeout": (0.001, WEEK),
        "header_timeout": (0.001, WEEK),
        "body_timeout": (0.001, WEEK),
        "write_timeout": (0.001, WEEK),
        "max_connections": (1, M),
        "max_body_bytes": (1024, 4 * G),
        "max_total_body_bytes": (1024, 2**40),
        "max_header_bytes": (1024, M),
        "stream_keep_alive_interval": (0.001, WEEK),
        "models_max": (1, 1024),
        "models_idle_timeout": (0.001, WEEK),
    },
}
# the lower bound itself is refused
EXCLUDED = {
    *("timeout_seconds", "gpu_memory_utilization", "kv_offloading_size", "engine_recovery_timeout_sec"),
    *("suffix_decoding_max_spec_factor", "weight_cache_gb"),
}


def bounded(kind: type) -> dict[str, Setting]:
    return {name: each for name, each in settings_of(kind).items() if each.bounds != (-math.inf, math.inf)}


def classes_of_config() -> Iterator[type]:
    for found in pkgutil.walk_packages(inflight.config.__path__, "inflight.config."):
        module = importlib.import_module(found.name)
        for each in vars(module).values():
            if isinstance(each, type) and each.__module__ == module.__name__ and dataclasses.is_dataclass(each):
                yield each


def test_no_class_is_missing() -> None:
    assert {each for each in classes_of_config() if bounded(each)} == set(BOUNDS) - {ServerSettings}


@pytest.mark.parametrize("kind", BOUNDS)
def test_no_setting_is_missing(kind: type) -> None:
    assert {name for name, each in settings_of(kind).items() if each.type in (int, float) and not each.choices} == {
        *BOUNDS[kind]
    }


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BOUNDS.items() for name in names])
def test_what_is_allowed(kind: type, name: str) -> None:
    (low, high), declared = BOUNDS[kind][name], settings_of(kind)[name]
    step: Any = 1 if declared.type is int else 1e-9 * high
    values = [(low, name not in EXCLUDED), (low + step, True), (low - step, False)]
    values += [(high - step, True), (high, True), (high + step, False)]
    for value, is_allowed in values:
        problem = declared.problem(value)
        assert (problem is None) == is_allowed, (value, problem)
        assert is_allowed or f"{name}=" in str(problem)
