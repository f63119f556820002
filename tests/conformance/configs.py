"""An `EngineConfig` and plans for workers that have no model."""

from __future__ import annotations

from pathlib import Path

from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from inflight.config.mixers import AttentionSpec, RopeConfig
from inflight.config.reasoning import ReasoningConfig
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.step import SchedulerOutput
from tests.support.plans import step_plan


def engine_config(
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    backend: str = "uni",
    budget: float = 10.0,
    name: str = "scripted",
) -> EngineConfig:
    architecture = ModelArchitecture(
        name="Scripted",
        vocab_size=16,
        hidden_size=8,
        layers=(
            LayerSpec(
                mixer=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, rope=RopeConfig()),
                mlp=GatedMlpSpec(size=8),
            ),
        ),
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
    )
    return EngineConfig(
        model=ModelConfig(
            folder=Path("/nowhere"),
            name=name,
            architecture=architecture,
            dtype="float32",
            max_model_len=64,
            load_format="dummy",
            seed=0,
            fingerprint="",
        ),
        cache=CacheConfig(
            block_size=16, dtype="float32", enable_prefix_caching=True, memory_bytes=None, memory_utilization=0.9
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, enable_chunked_prefill=True, policy="fcfs", depth=1, stagger=1
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            pipeline_layer_partition=(1,) * pipeline_parallel_size,
            distributed_executor_backend=backend,
        ),
        device=DeviceConfig(kind="cpu", num_threads=1, threads_bind="off"),
        reasoning_end="",
        reasoning_budget=-1,
        reasoning_budget_message="",
        reasoning=ReasoningConfig(),
        speculative=None,
        execute_model_timeout_seconds=budget,
    )


def plan(step_id: int, request_ids: tuple[str, ...] = ("req-a", "req-b")) -> SchedulerOutput:
    count = len(request_ids)
    return step_plan(range(count), [7] * count, [1] * count, [True] * count, step_id=step_id, request_ids=request_ids)


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=num_blocks, block_bytes=64, groups=())
