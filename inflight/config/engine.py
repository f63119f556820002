"""`EngineConfig` and its parts: the engine's configuration after `resolve.py` has given every "auto" and None a value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.config.architecture import ModelArchitecture
from inflight.config.ranks import RankLayout
from inflight.setting import setting


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """How float weights are quantized: None (not at all), "int8" or "fp8" (a scale per row), or "int4" (a scale per group).

    `layers` is for all linear layers except the head. `group_size` is the number of input features that share a scale and an
    offset in int4.
    """

    layers: str | None = None
    head: str | None = None
    group_size: int = 64


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: its folder (or GGUF file), network, numeric type and the longest sequence served.

    `fingerprint` goes into every prefix-cache key, so two models never share a key.
    """

    folder: Path
    name: str
    architecture: ModelArchitecture
    dtype: str
    max_model_len: int
    load_format: str  # "safetensors" | "gguf" | "dummy"
    seed: int
    fingerprint: str
    quantization: QuantizationConfig = QuantizationConfig()
    batch_invariant: bool = False  # refuse to start if results may depend on the batch
    generation_overrides: dict[str, Any] = field(default_factory=dict)  # for generation_config.json; Any: JSON


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache. `memory_bytes` is its size on each rank. If this is None, the worker measures how much memory is free, and
    uses at most the share `memory_utilization` of the memory. If `usual_sequence_len` is set, the cache gets at most the memory
    that `max_num_seqs` sequences of this length need.

    `dtype` is that of keys and values: the model's dtype, "int8" or "float8_e4m3fn".
    """

    block_size: int
    dtype: str
    enable_prefix_caching: bool
    memory_bytes: int | None
    memory_utilization: float
    usual_sequence_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step, and how many steps overlap. `policy` is "fcfs" or "priority" (a lower number is served first).

    `depth` is the number of steps in flight. After a step that draws a token for a request, the next `stagger - 1` steps leave
    this request out. With several stages depth must be larger than stagger: otherwise stages wait for work.

    If `max_stagger` is set, stagger and depth are minimum values: at the start `engine.pipeline_tuning` measures the pipeline
    and chooses a stagger of at most `max_stagger`, and a depth of at least stagger + 1. If it is None, both stay as they are.

    `target_seconds` is the longest time that prompts in a step may put between two tokens of a request; None: it follows from
    the decodes of the moment; infinite: no limit. `max_step_seconds` limits a step while no request decodes.
    `scheduler.step_limits` describes these two, and how prompts share a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: str
    depth: int
    stagger: int
    max_stagger: int | None = None
    target_seconds: float | None = math.inf
    max_step_seconds: float = math.inf
    max_num_partial_prefills: int = 4
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 256

    @property
    def limits_time(self) -> bool:
        return self.target_seconds != math.inf or self.max_step_seconds != math.inf

    @property
    def max_depth(self) -> int:
        """The most steps that may be in flight, for any stagger that the start may choose."""
        return self.depth if self.max_stagger is None else max(self.depth, self.max_stagger + 1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks there are, who runs them, and how many layers each pipeline stage has.

    The backend is "uni" (ranks are threads of one process), "mp" (a process for each rank) or "external_launcher" (a process
    with an engine for each rank). With "mp" the ranks are split evenly over `nnodes`, in order. If there are several nodes,
    node 0 listens on `master_addr`:`master_port`.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layer_partition: tuple[int, ...]  # [pipeline_parallel_size]
    distributed_executor_backend: str  # "uni" | "mp" | "external_launcher" | "package.module:ClassName"
    nnodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29501

    @property
    def num_local_ranks(self) -> int:
        """Ranks on each node."""
        return self.world_size // self.nnodes

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.tensor_parallel_size, self.pipeline_parallel_size)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Each step proposes up to `num_speculative_tokens` tokens, and the next step verifies them.

    "ngram" looks for the last earlier occurrence of the sequence's last n tokens, and proposes the tokens that followed it.
    It uses the largest n of [`prompt_lookup_min`, `prompt_lookup_max`] for which there is such an occurrence.
    """

    method: str = setting("ngram", "How tokens are proposed.", choices=("ngram",))
    num_speculative_tokens: int = setting(4, "Most tokens to propose in a step.", bounds=(1, 64))
    prompt_lookup_min: int = setting(2, "Smallest n.", bounds=(1, 32))
    prompt_lookup_max: int = setting(4, "Largest n.", bounds=(1, 32))


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """`backend` is "llguidance" or "xgrammar". A grammar starts after the text `reasoning_end`, or at once if this is ""."""

    backend: str
    reasoning_end: str


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What ranks run on: `kind` is "cpu" or "cuda".

    Attributes:
        num_threads: the size of a rank's thread pool. On a CPU it computes the model; on a GPU the pool only converts weights.
        threads_bind: the cores that its threads are bound to, written as `cpu_binding.py` reads them.
        enforce_eager: do not use CUDA graphs.
        cuda_graph_max_tokens: the most tokens in a step with prompts that gets a CUDA graph; 0: only decode steps have graphs.
    """

    kind: str
    num_threads: int
    threads_bind: str
    enforce_eager: bool = False
    cuda_graph_max_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The whole configuration. Each folder of the package gets only the parts that it needs."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: DeviceConfig
    structured_outputs: StructuredOutputsConfig
    speculative: SpeculativeConfig | None
    execute_model_timeout_seconds: float
