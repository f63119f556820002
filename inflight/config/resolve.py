"""Turns every "auto" and None into a value, once. A pure function of the arguments, the model and the machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inflight.config.architecture import DTYPE_BYTES, ModelArchitecture
from inflight.config.cpu_binding import AUTO, OFF, cores_of_rank, parse_core_lists
from inflight.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    QuantizationConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
)
from inflight.config.engine_args import EngineArgs
from inflight.config.nodes import ranks_of_node
from inflight.config.partition import check_tensor_parallel_size, resolve_partition
from inflight.config.speculative import resolve_speculative
from inflight.errors import ConfigError
from inflight.hub import GGUF_SUFFIX

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_DEPTH = 2  # steps in flight on one stage: the next one is ready before this one ends
# A CPU's memory is shared with everything else on the machine, a GPU's is not.
DEFAULT_CPU_MEMORY_UTILIZATION = 0.5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about the device that a choice may depend on."""

    device: str
    num_cores: int
    dtypes: tuple[str, ...]  # those its arithmetic supports
    usable_cores: tuple[int, ...] = ()  # that this process may run on, ascending
    threads_bind: str = AUTO  # what the environment says, see `cpu_binding`


def resolve(
    args: EngineArgs, *, folder: Path, architecture: ModelArchitecture, machine: Machine, timeout_seconds: float
) -> EngineConfig:
    """The concrete configuration.

    Raises:
        ConfigError: an argument does not fit the model or the machine.
    """
    check_tensor_parallel_size(args.tensor_parallel_size, architecture)
    dtype = _resolve_dtype(args.dtype, architecture.dtype, machine)
    max_model_len = _resolve_max_model_len(args, architecture)
    load_format = _resolve_load_format(args.load_format, folder)
    parallel = _resolve_parallel(args, architecture)
    quantization = _resolve_quantization(args)
    kv_cache_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    fingerprint = _fingerprint(folder, architecture, dtype, kv_cache_dtype, load_format, args.seed, quantization)
    return EngineConfig(
        model=ModelConfig(
            folder=folder,
            name=args.model or "embedded",
            architecture=architecture,
            dtype=dtype,
            max_model_len=max_model_len,
            load_format=load_format,
            seed=args.seed,
            fingerprint=fingerprint,
            quantization=quantization,
            batch_invariant=args.batch_invariant,
        ),
        cache=CacheConfig(
            block_size=args.block_size or DEFAULT_BLOCK_SIZE,
            dtype=kv_cache_dtype,
            enable_prefix_caching=args.enable_prefix_caching,
            memory_bytes=args.kv_cache_memory_bytes,
            memory_utilization=args.gpu_memory_utilization or DEFAULT_CPU_MEMORY_UTILIZATION,
        ),
        scheduler=_resolve_scheduler(args, max_model_len),
        parallel=parallel,
        device=_resolve_device(args, parallel.num_local_ranks, machine),
        structured_outputs=StructuredOutputsConfig(
            backend=args.structured_outputs_backend, reasoning_end=args.reasoning_end
        ),
        speculative=resolve_speculative(args.speculative_config),
        execute_model_timeout_seconds=timeout_seconds,
    )


def find_conflicts(args: EngineArgs, *, folder: Path, architecture: ModelArchitecture, machine: Machine) -> list[str]:
    """All that `resolve` would refuse, where it names the first; empty if it would not."""
    world_size = args.tensor_parallel_size * args.pipeline_parallel_size
    max_model_len = args.max_model_len or architecture.max_position_embeddings
    parts: list[Callable[[], object]] = [
        lambda: check_tensor_parallel_size(args.tensor_parallel_size, architecture),
        lambda: _resolve_dtype(args.dtype, architecture.dtype, machine),
        lambda: _resolve_max_model_len(args, architecture),
        lambda: _resolve_load_format(args.load_format, folder),
        lambda: _resolve_parallel(args, architecture),
        lambda: _resolve_scheduler(args, max_model_len),
        lambda: _resolve_depth(args),
        lambda: _resolve_device(args, max(1, world_size // args.nnodes), machine),
        lambda: resolve_speculative(args.speculative_config),
    ]
    found: list[str] = []
    for part in parts:
        try:
            part()
        except ConfigError as error:
            found += [] if str(error) in found else [str(error)]
    return found


def _resolve_max_model_len(args: EngineArgs, architecture: ModelArchitecture) -> int:
    max_model_len = args.max_model_len or architecture.max_position_embeddings
    if max_model_len > architecture.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the model's own limit of "
            f"{architecture.max_position_embeddings} positions; lower it"
        )
    return max_model_len


def _resolve_scheduler(args: EngineArgs, max_model_len: int) -> SchedulerConfig:
    max_num_batched_tokens = args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    if not args.enable_chunked_prefill:
        if args.max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        elif max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt must fit one step: max_num_batched_tokens={max_num_batched_tokens} is "
                f"less than max_model_len={max_model_len}; raise the first or lower the second"
            )
    max_num_seqs = args.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, max_num_batched_tokens)
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={max_num_batched_tokens} is less than max_num_seqs={max_num_seqs}: a step could not "
            "take one token of each; raise the first or lower the second"
        )
    depth, stagger = _resolve_depth(args)
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        depth=depth,
        stagger=stagger,
    )


def _resolve_depth(args: EngineArgs) -> tuple[int, int]:
    """(steps in flight, stagger)."""
    num_stages = args.pipeline_parallel_size
    if num_stages == 1:
        for name in ("pipeline_stagger", "pipeline_depth"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(args, name)} is for pipeline_parallel_size > 1; leave it out: with one stage "
                    "async_scheduling says whether steps overlap"
                )
        if args.async_scheduling is None:
            return DEFAULT_DEPTH, 1
        return (2 if args.async_scheduling else 1), 1
    if args.async_scheduling is False:
        raise ConfigError(
            f"async_scheduling=False does not go with pipeline_parallel_size={num_stages}: stages work at the same time only "
            "while several steps are in flight; leave it out, or use one stage"
        )
    stagger = args.pipeline_stagger or num_stages
    depth = args.pipeline_depth or stagger + 1
    if stagger < num_stages:
        raise ConfigError(
            f"pipeline_stagger={stagger} is less than pipeline_parallel_size={num_stages}: a token would be needed by the "
            "first stage before the last one has drawn it; raise it or leave it out"
        )
    if depth <= stagger:
        raise ConfigError(
            f"pipeline_depth={depth} is not more than pipeline_stagger={stagger}: the stages would wait for the engine in "
            "every step; raise the first or leave it out"
        )
    return depth, stagger


def _resolve_parallel(args: EngineArgs, architecture: ModelArchitecture) -> ParallelConfig:
    world_size = args.tensor_parallel_size * args.pipeline_parallel_size
    ranks_of_node(world_size, args.nnodes, args.node_rank)  # it refuses sizes that cannot be split
    return ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        pipeline_layer_partition=resolve_partition(
            args.pipeline_layer_partition, architecture, args.pipeline_parallel_size
        ),
        distributed_executor_backend=args.distributed_executor_backend or ("uni" if world_size == 1 else "mp"),
        nnodes=args.nnodes,
        master_addr=args.master_addr,
        master_port=args.master_port,
    )


def _resolve_device(args: EngineArgs, num_local_ranks: int, machine: Machine) -> DeviceConfig:
    threads_bind = args.cpu_threads_bind or machine.threads_bind
    num_threads = args.num_threads or max(1, machine.num_cores // num_local_ranks)
    if threads_bind not in (AUTO, OFF):
        lists = parse_core_lists(threads_bind, num_local_ranks)
        num_threads = args.num_threads or len(lists[0])
        for rank in range(num_local_ranks):  # of this node; a rank of another one finds out for itself
            cores_of_rank(
                threads_bind,
                usable=machine.usable_cores,
                num_threads=num_threads,
                local_rank=rank,
                num_local_ranks=num_local_ranks,
            )
    return DeviceConfig(kind=machine.device, num_threads=num_threads, threads_bind=threads_bind)


def _resolve_dtype(wanted: str, checkpoint: str, machine: Machine) -> str:
    if wanted != "auto":
        if wanted not in machine.dtypes:
            raise ConfigError(
                f"dtype={wanted!r} cannot run on this {machine.device}; it runs {', '.join(machine.dtypes)}: use one of them"
            )
        return wanted
    if checkpoint in machine.dtypes:
        return checkpoint
    # float16 weights on a device without float16 arithmetic: bfloat16 has the range, float32 would double the bytes
    return "bfloat16" if "bfloat16" in machine.dtypes and DTYPE_BYTES.get(checkpoint) == 2 else "float32"


def _resolve_load_format(wanted: str, folder: Path) -> str:
    stored = "gguf" if folder.suffix == GGUF_SUFFIX and folder.is_file() else "safetensors"
    if wanted not in ("auto", "dummy", stored):
        raise ConfigError(f"load_format={wanted!r}, but {folder} holds {stored}; leave load_format out")
    return stored if wanted == "auto" else wanted


def _resolve_quantization(args: EngineArgs) -> QuantizationConfig:
    head: str | None = args.head_quantization
    if head == "auto":
        head = None if args.quantization is None else "int8"  # its errors go straight into the logits
    elif head == "none":
        head = None
    return QuantizationConfig(layers=args.quantization, head=head, group_size=args.quantization_group_size)


def _fingerprint(
    folder: Path,
    architecture: ModelArchitecture,
    dtype: str,
    kv_cache_dtype: str,
    load_format: str,
    seed: int,
    quantization: QuantizationConfig,
) -> str:
    drawn_from = seed if load_format == "dummy" else 0
    text = repr((str(folder.resolve()), architecture, dtype, kv_cache_dtype, load_format, drawn_from, quantization))
    return hashlib.sha256(text.encode()).hexdigest()
