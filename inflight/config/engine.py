"""`EngineConfig` and its parts. Every value is concrete here: "auto" and None have been resolved by `resolve.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inflight.config.architecture import ModelArchitecture
from inflight.config.ranks import RankLayout


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """What becomes of weights that the checkpoint has as floats: None (they stay), "int8" or "fp8" (a scale a row), or "int4".

    `layers` is for all linear layers but the head. `group_size`: the input features that share a scale and an offset in int4.
    """

    layers: str | None = None
    head: str | None = None
    group_size: int = 64


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: its folder (or GGUF file), network, numeric type and the longest sequence served.

    `fingerprint` goes into every prefix-cache key, so that keys of two models can never meet.
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
    batch_invariant: bool = False  # refuse to start where it cannot be promised


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache. If `memory_bytes` is None, the cache takes what `determine_available_memory` finds within
    `memory_utilization`; if `usual_sequence_len` is set, no more than `max_num_seqs` sequences of that many tokens need.

    `dtype` is the model's, "int8" or "float8_e4m3fn".
    """

    block_size: int
    dtype: str
    enable_prefix_caching: bool
    memory_bytes: int | None
    memory_utilization: float
    usual_sequence_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step, and how many overlap. `policy` is "fcfs" or "priority" (a lower number is served first).

    `depth` is the number of steps in flight. While a token is being drawn, its request is in none of the next `stagger - 1`
    steps; 1 says that the next step may take it. With several stages depth > stagger, else they would run dry.

    If `max_stagger` is set, stagger and depth are minimum values: the start measures the pipeline and chooses a stagger of
    at most `max_stagger`, and a depth of at least stagger + 1 (`engine.pipeline_tuning`). None: both stay as they are.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: str
    depth: int
    stagger: int
    max_stagger: int | None = None

    @property
    def max_depth(self) -> int:
        """The most steps that may be in flight, for any stagger that the start may choose."""
        return self.depth if self.max_stagger is None else max(self.depth, self.max_stagger + 1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks there are, who runs them, and how many layers each pipeline stage has.

    The backend is "uni", ranks as threads of one process, "mp", a process each, or "external_launcher", a process
    with an engine of its own each. With "mp" the ranks are split evenly over `nnodes`, in
    order. With several, node 0 listens on `master_addr`:`master_port`.
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
    """Drafts: `num_speculative_tokens` at most, proposed in each step and verified in the next.

    "ngram" proposes what followed the last earlier occurrence of the sequence's last n tokens; the largest n of
    [`prompt_lookup_min`, `prompt_lookup_max`] that has occurred counts.
    """

    method: str  # "ngram"
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """`backend` is "llguidance" or "xgrammar". After `reasoning_end`, a text ("" for none), grammars of a request start."""

    backend: str
    reasoning_end: str


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What ranks run on: `kind` is "cpu" or "cuda".

    Attributes:
        num_threads: the size of a rank's thread pool, which computes on a CPU, and beside a GPU only converts weights.
        threads_bind: the cores that its threads are bound to, see `cpu_binding`.
        enforce_eager: no CUDA graphs at all.
        cuda_graph_max_tokens: batches of prompts and decodes are captured up to this size; 0: only decodes are.
    """

    kind: str
    num_threads: int
    threads_bind: str
    enforce_eager: bool = False
    cuda_graph_max_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs, composed; each part is handed to the rooms that need it, never the whole."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: DeviceConfig
    structured_outputs: StructuredOutputsConfig
    speculative: SpeculativeConfig | None
    execute_model_timeout_seconds: float
