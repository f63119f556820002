"""`resolve`: the configuration of the engine from the arguments, the model and the machine, without side effects."""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inflight import envs
from inflight.config.architecture import DTYPE_BYTES, TRANSFORMERS, ModelArchitecture
from inflight.config.device_options import (
    check_device_state,
    check_token_ids,
    resolve_device,
    resolve_kv_cache_dtype,
    resolve_quantization,
)
from inflight.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    QuantizationConfig,
    SchedulerConfig,
)
from inflight.config.engine_args import EngineArgs
from inflight.config.eplb import resolve_eplb
from inflight.config.expert_parallel import choose_all2all_backend, for_ranks, is_in_lockstep
from inflight.config.fault_tolerance import resolve_fault_tolerance
from inflight.config.kv_events import resolve_kv_events
from inflight.config.kv_transfer import resolve_kv_transfer
from inflight.config.machine import Machine
from inflight.config.partition import check_tensor_parallel_size, resolve_partition
from inflight.config.ranks import ranks_of_node
from inflight.config.reasoning import resolve_reasoning
from inflight.config.resolve_pooler import generating
from inflight.config.speculative import resolve_speculative
from inflight.config.unknown_family import native_refusal
from inflight.config.weight_format import GGUF
from inflight.config.whole_prompts import with_room_for_images, with_whole_prompts
from inflight.errors import ConfigError
from inflight.hub import GGUF_SUFFIX
from inflight.model_name import EMBEDDED

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
DEFAULT_DEPTH = 2  # steps in flight with one pipeline stage: the engine plans the next step while the current one runs
# With stagger N, a request draws a token in every N-th step only. The start chooses an N of at most 3 x the number of stages.
# This is enough if sending to the next stage takes up to twice as long as the stage itself.
MAX_STAGGER_PER_STAGE = 3
DEFAULT_BLOCK_SIZE = 16
# On a CPU, other programs use the same memory. A GPU's memory is for the engine alone.
DEFAULT_MEMORY_UTILIZATION = {"cpu": 0.5, "cuda": 0.9}
# On a CPU, the default cache has room for max_num_seqs requests of this many tokens, prompt and output together. Most chats
# are shorter.
# No block is set aside for a request in advance, so a longer request uses blocks that shorter requests do not need.
USUAL_SEQUENCE_LEN = 1024


def resolve(
    args: EngineArgs, *, folder: Path, architecture: ModelArchitecture, machine: Machine, timeout_seconds: float
) -> EngineConfig:
    """Check the arguments, and replace None and "auto" by values that fit the model and the machine.

    Raises:
        ConfigError: an argument does not fit the model or the machine.
    """
    args = with_whole_prompts(args, architecture)
    _check_fallback(args, folder, architecture)
    _check_layers(architecture, machine)
    check_tensor_parallel_size(args.tensor_parallel_size, for_ranks(args, architecture, machine))
    dtype = _resolve_dtype(args.dtype, architecture.dtype, machine)
    max_model_len = _resolve_max_model_len(args, architecture)
    architecture = architecture.for_length(max_model_len)
    load_format = _resolve_load_format(args.load_format, folder)
    parallel = _resolve_parallel(args, architecture)
    quantization = resolve_quantization(args, machine, _weight_format(folder, architecture))
    kv_cache_dtype = resolve_kv_cache_dtype(args.kv_cache_dtype, dtype, machine)
    scheduler = _resolve_scheduler(args, architecture, max_model_len, machine)
    _check_device_state(args, max_model_len, machine)
    speculative = resolve_speculative(args.speculative_config)
    is_of_transformers = architecture.implementation == TRANSFORMERS
    may_have_states = architecture.recurrences or is_of_transformers
    num_states = 1 if speculative is None or not may_have_states else 1 + speculative.num_speculative_tokens
    weights_seed = 0 if args.seed is None else args.seed
    cache = resolve_cache(
        args,
        max_model_len=max_model_len,
        dtype=kv_cache_dtype,
        machine=machine,
        default_block_size=_default_block_size(
            architecture, dtype, kv_cache_dtype, args.tensor_parallel_size, num_states
        ),
        num_states=num_states,
    )
    is_on_one_machine = args.served_replicas == args.replicas and not (cache.transfer and cache.transfer.tiers)
    fingerprint = _fingerprint(
        folder if is_on_one_machine else Path("/"),  # it may have another name on each machine
        architecture,
        args.hf_overrides if is_of_transformers else None,  # which else is in the architecture
        dtype,
        kv_cache_dtype,
        load_format,
        weights_seed,
        quantization,
    )
    return EngineConfig(
        model=ModelConfig(
            folder=folder,
            name=args.model or EMBEDDED,
            architecture=architecture,
            dtype=dtype,
            max_model_len=max_model_len,
            load_format=load_format,
            seed=weights_seed,
            fingerprint=fingerprint,
            quantization=quantization,
            batch_invariant=args.batch_invariant,
            generation_overrides=dict(args.override_generation_config or {}),
            config_overrides=dict(args.hf_overrides or {}),
            trust_remote_code=args.trust_remote_code,
            pooler=architecture.pooler or generating(args),
            weight_cache_bytes=int(args.weight_cache_gb * 1e9) if args.weight_cache and envs.weight_cache() else 0,
        ),
        cache=cache,
        scheduler=scheduler,
        parallel=parallel,
        device=resolve_device(
            args, parallel.places[0].num_local_ranks, machine, max_num_batched_tokens=scheduler.max_num_batched_tokens
        ),
        reasoning_end=args.reasoning_end,
        reasoning_budget=args.reasoning_budget,
        reasoning_budget_message=args.reasoning_budget_message,
        reasoning=resolve_reasoning(args.reasoning_config),
        speculative=speculative,
        execute_model_timeout_seconds=timeout_seconds,
        fault_tolerance=resolve_fault_tolerance(args.enable_fault_tolerance, args.fault_tolerance_config),
    )


def find_conflicts(args: EngineArgs, *, folder: Path, architecture: ModelArchitecture, machine: Machine) -> list[str]:
    """All problems for which `resolve` would refuse the arguments; `resolve` itself raises the first one only."""
    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size * len(args.replicas)
    max_model_len = args.max_model_len or architecture.default_max_model_len
    parts: list[Callable[[], object]] = [
        lambda: _check_fallback(args, folder, architecture),
        lambda: _check_layers(architecture, machine),
        lambda: check_tensor_parallel_size(args.tensor_parallel_size, for_ranks(args, architecture, machine)),
        lambda: _resolve_dtype(args.dtype, architecture.dtype, machine),
        lambda: _resolve_max_model_len(args, architecture),
        lambda: _resolve_load_format(args.load_format, folder),
        lambda: _resolve_parallel(args, architecture),
        lambda: _resolve_scheduler(with_whole_prompts(args, architecture), architecture, max_model_len, machine),
        lambda: _check_device_state(args, max_model_len, machine),
        lambda: _resolve_depth(args),
        lambda: resolve_device(args, max(1, num_ranks // args.nnodes), machine, max_num_batched_tokens=1),
        lambda: resolve_quantization(args, machine, _weight_format(folder, architecture)),
        lambda: resolve_kv_cache_dtype(args.kv_cache_dtype, args.dtype, machine),
        lambda: resolve_speculative(args.speculative_config),
        lambda: resolve_kv_events(args.kv_events_config, is_caching=args.enable_prefix_caching, replicas=args.replicas),
        lambda: resolve_kv_transfer(args),
        lambda: resolve_fault_tolerance(args.enable_fault_tolerance, args.fault_tolerance_config),
    ]
    found: list[str] = []
    for part in parts:
        try:
            part()
        except ConfigError as error:
            found += [] if str(error) in found else [str(error)]
    return found


def _check_fallback(args: EngineArgs, folder: Path, architecture: ModelArchitecture) -> None:
    """
    Raises:
        ConfigError: transformers' code computes the model, and an argument is for Inflight's own code only.
    """
    if architecture.implementation != TRANSFORMERS:
        return
    num_kv_heads = architecture.attentions[0].num_kv_heads
    problem = (
        "batch_invariant=True"
        if args.batch_invariant
        else "a GGUF file"
        if _is_gguf(folder)
        else f"tensor_parallel_size={args.tensor_parallel_size} and {num_kv_heads} key/value heads"
        if num_kv_heads % args.tensor_parallel_size
        else None
    )
    if problem is not None:
        raise ConfigError(
            f"{architecture.name} is computed by transformers, which does not go with {problem}; leave it out, or take a "
            f"model of one of Inflight's own families{native_refusal(architecture)}"
        )


def _check_layers(architecture: ModelArchitecture, machine: Machine) -> None:
    """
    Raises:
        ConfigError: the model has layers of a kind that does not run on the machine.
    """
    for part in (part for layer in architecture.layers for part in (layer.mixer, layer.mlp)):
        if machine.device == "cuda" and part.only_on_cpu:
            raise ConfigError(f"{architecture.name} has {part.only_on_cpu}")


def _resolve_max_model_len(args: EngineArgs, architecture: ModelArchitecture) -> int:
    max_model_len = args.max_model_len or architecture.default_max_model_len
    if max_model_len > architecture.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the model's own limit of "
            f"{architecture.max_position_embeddings} positions; lower it, or leave it out"
        )
    return max_model_len


def _resolve_scheduler(
    args: EngineArgs, architecture: ModelArchitecture, max_model_len: int, machine: Machine
) -> SchedulerConfig:
    max_num_batched_tokens = args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[machine.device]
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
            "hold one token of each sequence; raise the first or lower the second"
        )
    depth, stagger, max_stagger = _resolve_depth(args)
    target_seconds, max_step_seconds = _resolve_step_time(args)
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        depth=depth,
        stagger=stagger,
        max_stagger=max_stagger,
        target_seconds=target_seconds,
        max_step_seconds=max_step_seconds,
        max_num_partial_prefills=args.max_num_partial_prefills,
        max_long_partial_prefills=args.max_long_partial_prefills,
        long_prefill_token_threshold=args.long_prefill_token_threshold or max(256, max_model_len // 25),
    )
    speculative = resolve_speculative(args.speculative_config)
    return with_room_for_images(scheduler, args, architecture, max_model_len=max_model_len, speculative=speculative)


def _default_block_size(
    architecture: ModelArchitecture, dtype: str, kv_cache_dtype: str, tp_size: int, num_states: int
) -> int:
    """The default number of tokens in a block: at least as many as the block's states, if it belongs to a recurrent layer. The
    blocks of a model with recurrent layers are so large that in a block of the same size the keys and values of all layers
    with attention have room."""
    num_tokens = num_states
    if architecture.recurrences:
        scale_bytes = 4 if kv_cache_dtype == "int8" else 0
        bytes_per_token = sum(
            each.token_bytes(DTYPE_BYTES.get(kv_cache_dtype, 1), scale_bytes, tp_size) for each in architecture.caching
        )
        state_bytes = max(each.state_bytes(DTYPE_BYTES[dtype], tp_size) for each in architecture.recurrences)
        num_tokens = max(num_tokens, -(-num_states * state_bytes // bytes_per_token))
    return -(-num_tokens // DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE


def resolve_cache(
    args: EngineArgs,
    *,
    max_model_len: int,
    dtype: str,
    machine: Machine,
    default_block_size: int = DEFAULT_BLOCK_SIZE,
    num_states: int = 1,
) -> CacheConfig:
    """`dtype`: the dtype of keys and values.

    Raises:
        ConfigError: `block_size` is less than `num_states`. Then the states of one step's drafts could need three blocks.
    """
    block_size = args.block_size or default_block_size
    if block_size < num_states:
        raise ConfigError(
            f"block_size={block_size} is less than the {num_states} tokens of a step with drafts (num_speculative_tokens + 1); "
            "raise the first or lower the second"
        )
    is_sized_by_user = args.kv_cache_memory_bytes is not None or args.gpu_memory_utilization is not None
    is_shared = machine.device == "cpu" and not is_sized_by_user
    return CacheConfig(
        block_size=block_size,
        dtype=dtype,
        enable_prefix_caching=args.enable_prefix_caching,
        state_checkpoint_tokens=args.state_checkpoint_tokens,
        num_states=num_states,
        memory_bytes=args.kv_cache_memory_bytes,
        memory_utilization=args.gpu_memory_utilization or DEFAULT_MEMORY_UTILIZATION[machine.device],
        usual_sequence_len=min(max_model_len, USUAL_SEQUENCE_LEN) if is_shared else None,
        events=resolve_kv_events(args.kv_events_config, is_caching=args.enable_prefix_caching, replicas=args.replicas),
        transfer=resolve_kv_transfer(args),
    )


def _resolve_step_time(args: EngineArgs) -> tuple[float | None, float]:
    """(target, longest step without decodes) in seconds, as `SchedulerConfig` has them."""
    if args.distributed_executor_backend == "external_launcher" or not args.enable_chunked_prefill:
        # With external_launcher each rank has an engine, and all engines must make the same plan. So no plan may depend on
        # measured times. Without chunked prefill, a prompt cannot be split to fit into a time.
        return math.inf, math.inf
    target = args.target_inter_token_latency
    longest = args.max_step_time
    max_step_seconds = math.inf if isinstance(longest, str) else longest / 1e3
    if isinstance(target, str):
        return (None if target == "auto" else math.inf), max_step_seconds
    return target / 1e3, max_step_seconds


def _check_device_state(args: EngineArgs, max_model_len: int, machine: Machine) -> None:
    max_num_seqs = args.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    check_token_ids(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    # with speculation the tokens of the requests are kept on the host, where no such limit holds
    if machine.device == "cuda" and args.speculative_config is None:
        num_slots = max_num_seqs + 1
        num_numbers = num_slots * (max_model_len + -(-max_model_len // (args.block_size or DEFAULT_BLOCK_SIZE)))
        check_device_state(num_numbers, max_num_seqs=num_slots - 1, max_model_len=max_model_len)


def _resolve_depth(args: EngineArgs) -> tuple[int, int, int | None]:
    """(steps in flight, stagger, the largest stagger that may be chosen at the start; None if the stagger is fixed)."""
    num_stages = args.pipeline_parallel_size
    if num_stages == 1:
        for name in ("pipeline_stagger", "pipeline_depth"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(args, name)} is for pipeline_parallel_size > 1; leave it out: with one stage "
                    "async_scheduling decides whether steps overlap"
                )
        if args.async_scheduling is None:
            return DEFAULT_DEPTH, 1, None
        return (2 if args.async_scheduling else 1), 1, None
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
    if args.pipeline_stagger is not None or args.distributed_executor_backend == "external_launcher":
        # with external_launcher all engines must make the same plan, so nothing may depend on a measured time
        return depth, stagger, None
    highest = MAX_STAGGER_PER_STAGE * num_stages
    return depth, stagger, highest if args.pipeline_depth is None else min(highest, depth - 1)


def _resolve_parallel(args: EngineArgs, architecture: ModelArchitecture) -> ParallelConfig:
    world_size = args.tensor_parallel_size * args.pipeline_parallel_size
    ranks_of_node(world_size, args.nnodes, args.node_rank)  # raises if the ranks cannot be split
    keeps_step = is_in_lockstep(args)
    usual_backend = "uni" if world_size == 1 and not keeps_step else "mp"
    return ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        pipeline_layer_partition=resolve_partition(
            args.pipeline_layer_partition, architecture, args.pipeline_parallel_size
        ),
        distributed_executor_backend=args.distributed_executor_backend or usual_backend,
        nnodes=args.nnodes,
        master_addr=args.master_addr,
        master_port=args.master_port,
        replicas=tuple(args.replicas),
        served=tuple(args.served_replicas),
        routes_by_prefix=args.routes_by_prefix,
        all2all_backend=choose_all2all_backend(args),
        eplb=resolve_eplb(args, architecture),
        is_in_lockstep=keeps_step,
    )


def _resolve_dtype(wanted: str, checkpoint: str, machine: Machine) -> str:
    if wanted != "auto":
        if wanted not in machine.dtypes:
            raise ConfigError(
                f"dtype={wanted!r} is not supported on this {machine.device}; use one of {', '.join(machine.dtypes)}"
            )
        return wanted
    if checkpoint in machine.dtypes:
        return checkpoint
    # For a float16 checkpoint on a device without float16: bfloat16 covers the range of float16, and float32 would need twice
    # the memory.
    if "bfloat16" in machine.dtypes and DTYPE_BYTES.get(checkpoint) == 2:
        return "bfloat16"
    return "float32"


def _weight_format(folder: Path, architecture: ModelArchitecture) -> str:
    return GGUF if _is_gguf(folder) else architecture.weight_format


def _is_gguf(folder: Path) -> bool:
    return folder.suffix == GGUF_SUFFIX and folder.is_file()


def _resolve_load_format(wanted: str, folder: Path) -> str:
    stored = "gguf" if _is_gguf(folder) else "safetensors"
    if wanted not in ("auto", "dummy", stored):
        raise ConfigError(f"load_format={wanted!r}, but {folder} holds {stored}; leave load_format out")
    return stored if wanted == "auto" else wanted


def _fingerprint(
    folder: Path,
    architecture: ModelArchitecture,
    overrides: Mapping[str, Any] | None,  # Any: JSON
    dtype: str,
    kv_cache_dtype: str,
    load_format: str,
    seed: int,
    quantization: QuantizationConfig,
) -> str:
    drawn_from = seed if load_format == "dummy" else 0
    text = repr(
        (str(folder.resolve()), architecture, overrides, dtype, kv_cache_dtype, load_format, drawn_from, quantization)
    )
    return hashlib.sha256(text.encode()).hexdigest()
