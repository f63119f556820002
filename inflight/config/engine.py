"""`EngineConfig` and its parts: the engine's configuration after `resolve.py` has given every "auto" and None a value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inflight.config.architecture import ModelArchitecture
from inflight.config.eplb import EplbConfig
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.config.kv_events import KVEventsConfig
from inflight.config.kv_transfer import KVTransferConfig
from inflight.config.pooler import GENERATING, PoolerSpec
from inflight.config.ranks import Place, RankLayout, places_on, ranks_of_node
from inflight.config.reasoning import ReasoningConfig
from inflight.config.speculative import SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """How the engine quantizes weights that the checkpoint stores in floats.

    `layers` is for all linear layers except the head (lm_head), and `head` is for the head. Each of the two is None (not
    quantized), "int8" or "fp8" (a scale per row), or "int4" (a scale and an offset per group). `group_size` is the number of
    input features in a group.
    """

    layers: str | None = None
    head: str | None = None
    group_size: int = 64


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: its folder (or GGUF file), network, numeric type and the longest sequence served.

    `fingerprint` is a hash of the folder and of everything else that changes keys and values. It goes into every prefix-cache
    key, so two models never share a key. If replicas are on several machines, the folder may have other names there. So it is
    left out, and the files are compared when a replica joins. `seed` is the seed of dummy weights.
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
    batch_invariant: bool = False  # refuse to start if a result could depend on other requests of its batch
    generation_overrides: dict[str, Any] = field(default_factory=dict)  # for generation_config.json; Any: JSON
    # for config.json, as transformers reads it; Any: JSON
    config_overrides: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False  # transformers may run Python files of the model's folder
    pooler: PoolerSpec = GENERATING  # what a request makes that wants vectors or scores
    mmproj: Path | None = None  # the file of a GGUF model that has its vision tower
    weight_cache_bytes: int = 0  # largest size of the cache of packed weights on the disk; 0: none


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache. `memory_bytes` is its size on each rank. If this is None, the worker measures the memory.

    On a GPU, weights, activations and cache together get at most the share `memory_utilization` of all memory. On a CPU,
    activations and cache get at most this share of what the weights leave of the free memory. If `usual_sequence_len` is set,
    too, the cache gets at most the memory that `max_num_seqs` sequences of this length need. `num_blocks` is the number of
    blocks that an engine before this one had on each rank: if it is set, this engine takes as many, and measures nothing.

    `dtype` is the dtype of keys and values: the model's dtype, "int8" or "float8_e4m3fn". Of recurrent layers, the prefix cache
    has the state after every `state_checkpoint_tokens` tokens, and after prompts and answers. `num_states`: how many states a
    block of a recurrent layer has.
    `events`: where replicas publish what is in their prefix caches; None if they do not. `transfer`: where blocks are kept
    outside of this cache; None if nowhere.
    """

    block_size: int
    dtype: str
    enable_prefix_caching: bool
    memory_bytes: int | None
    memory_utilization: float
    num_blocks: int | None = None
    usual_sequence_len: int | None = None
    state_checkpoint_tokens: int = 512
    num_states: int = 1
    events: KVEventsConfig | None = None
    transfer: KVTransferConfig | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step, and how many steps overlap. `policy` is "fcfs" or "priority" (a lower number is served first).

    `depth` is the number of steps that are in flight at the same time. After a step that draws a token for a request, the next
    `stagger - 1` steps leave this request out. With several pipeline stages, `depth` must be larger than `stagger`: otherwise
    stages wait for work.

    If `max_stagger` is set, `stagger` and `depth` are minimum values: at the start `engine.pipeline_tuning` measures the
    pipeline and chooses a stagger of at most `max_stagger`, and a depth of at least stagger + 1. If `max_stagger` is None,
    `stagger` and `depth` stay as they are.

    `target_seconds` limits the prompt tokens of a step: if the step also has decodes, no request should wait longer than this
    time for its next token. None: the time is computed from the decodes of the step; infinite: no limit. `max_step_seconds`
    limits a step while no request decodes. `scheduler.step_time.limits` describes these two, and how prompts share a step.
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
        if self.max_stagger is None:
            return self.depth
        return max(self.depth, self.max_stagger + 1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks there are, who runs them, and how many layers each pipeline stage has.

    The backend is "uni" (ranks are threads of one process), "mp" (the engine starts a process for each rank), "ray" (the same,
    on the machines that Ray chooses), "external_launcher" (torchrun starts a process for each rank, and each process has an
    engine) or the name of an `Executor` class. With "mp" the ranks are split evenly over `nnodes` machines, in the
    order of the ranks. If there are several nodes, node 0 listens on `master_addr`:`master_port`.

    `replicas` are the numbers of the engine's replicas on this machine: `inflight serve` on another machine may have others.
    Each has a configuration with its own `replica_index`. They share the machine's cores, its memory and its GPUs.
    `served` are the numbers of all replicas that the same front ends have. If the front ends are on another machine, `head`
    is its address, `terms` is what must be the same on both machines, as name -> value, and `headless` is a random name of
    the process that runs the replicas there.
    `all2all_backend`: how ranks exchange tokens, if each has whole experts; None: each has a part of every expert.
    `eplb`: how busy experts get copies on other ranks; None: they get none.
    `is_in_lockstep`: the ranks of all replicas divide the experts, so all replicas run the same steps (engine/lockstep/).
    By `lockstep_secret`, a random text, they find each other.
    `routes_by_prefix`: requests go to replicas that have cached their prompt, unless these have too much to do.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layer_partition: tuple[int, ...]  # [pipeline_parallel_size]
    distributed_executor_backend: str  # "uni" | "mp" | "ray" | "external_launcher" | "package.module:ClassName"
    nnodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    replicas: tuple[int, ...] = (0,)
    replica_index: int = 0
    served: tuple[int, ...] = (0,)
    head: tuple[str, int] | None = None
    terms: dict[str, str] = field(default_factory=dict)
    headless: str = ""
    routes_by_prefix: bool = False
    all2all_backend: str | None = None
    eplb: EplbConfig | None = None
    is_in_lockstep: bool = False
    lockstep_secret: str = field(default="", repr=False)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the ranks run, if they are split evenly over the nodes."""
        nodes = range(self.nnodes)
        machines = [node for node in nodes for _ in ranks_of_node(self.world_size, self.nnodes, node)]
        return places_on(machines, replica=self.replica_index, num_replicas=len(self.replicas))

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.tensor_parallel_size, self.pipeline_parallel_size)


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What ranks run on: `kind` is "cpu" or "cuda".

    Attributes:
        num_threads: the number of compute threads of a rank. With device "cpu" they compute the model. With "cuda" they only
            convert weights.
        threads_bind: the cores that the compute threads are bound to, written as `cpu_binding.py` reads them.
        enforce_eager: do not use CUDA graphs.
        cuda_graph_max_tokens: a step with prompts gets a CUDA graph if it has at most this many tokens. 0: only steps without
            prompts have graphs.
        free_host_bytes: the memory of this machine that was free before a process of the engine was started; None: unknown.
    """

    kind: str
    num_threads: int
    threads_bind: str
    enforce_eager: bool = False
    cuda_graph_max_tokens: int = 0
    free_host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The whole configuration. Each folder of the package gets only the parts that it needs.

    A request's grammar applies to the text after the reasoning, which ends with `reasoning_end`. If `reasoning_end` is "", the
    grammar applies to the whole output.

    The reasoning of a chat that sets no limit of its own has at most `reasoning_budget` tokens (-1: no limit). At a limit,
    `reasoning_budget_message` and the end tag are written.

    `draft_model` is the model that proposes drafts, if `speculative` names one.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: DeviceConfig
    reasoning_end: str
    reasoning_budget: int
    reasoning_budget_message: str
    reasoning: ReasoningConfig
    speculative: SpeculativeConfig | None
    execute_model_timeout_seconds: float
    draft_model: ModelConfig | None = None
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)

    @property
    def head_dims(self) -> list[int]:
        """The sizes of heads in the KV cache, those of the draft model included."""
        drafting = [] if self.draft_model is None else self.draft_model.architecture.head_dims
        return list(dict.fromkeys([*self.model.architecture.head_dims, *drafting]))

    def replicas(self) -> list[EngineConfig]:
        """Returns the configuration of each replica of the engine on this machine."""
        indices = range(len(self.parallel.replicas))
        return [replace(self, parallel=replace(self.parallel, replica_index=index)) for index in indices]
