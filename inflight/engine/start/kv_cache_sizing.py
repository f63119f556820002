"""Computes the size of the KV cache: how many blocks fit into the memory, and which layers share them (`KVCacheConfig`).
`allocate_kv_cache` asks the ranks for their layers and free memory, and lets them allocate the cache.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from inflight.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from inflight.engine.start.contents import contents_of
from inflight.errors import OutOfMemoryError
from inflight.executor.executor import Executor
from inflight.interface.kv_cache import STATE_BLOCKS, KVCacheConfig, KVCacheGroup, KVCacheSpec, count_groups

logger = logging.getLogger(__name__)

MIN_SLOTS = 16  # blocks in the host pool, one of which is the dummy block


def make_groups(ranks: Sequence[Mapping[str, KVCacheSpec]]) -> list[tuple[KVCacheGroup, ...]]:
    """Put the layers of each rank into groups of about equal size. Then a block needs about as many bytes in every group.

    Layers with equal specs are of one kind, and a group has layers of one kind (see `count_groups`). Blocks of smaller groups
    are padded. A request has one block table for each group, and all ranks use the same tables. So each rank has as many groups
    of a kind as the whole model needs. It divides its own layers of this kind among these groups, and may have no layer in some
    of them.

    Args:
        ranks: for each rank: layer name -> spec.

    Returns:
        For each rank, its groups.
    """
    whole = {name: spec for specs in ranks for name, spec in specs.items()}
    num_groups = count_groups(whole.values())
    return [
        tuple(group for kind, count in num_groups.items() for group in _groups_of_kind(specs, kind, count))
        for specs in ranks
    ]


def _groups_of_kind(specs: Mapping[str, KVCacheSpec], kind: KVCacheSpec, count: int) -> list[KVCacheGroup]:
    names = [name for name, spec in specs.items() if spec == kind]
    size = -(-len(names) // count)
    parts = (names[i * size : (i + 1) * size] for i in range(count))
    return [KVCacheGroup(layer_names=tuple(part), spec=kind) for part in parts]


def blocks_per_sequence(groups: Sequence[KVCacheGroup], *, num_tokens: int, max_step_tokens: int) -> int:
    """Returns the largest number of blocks that one sequence of `num_tokens` needs, summed over all groups.

    In a group with a sliding window, a sequence needs blocks only for the window and for the tokens of the current step. In a
    group of recurrent layers, it needs STATE_BLOCKS.
    """
    total = 0
    for group in groups:
        size, window = group.spec.block_size, group.spec.sliding_window
        held = num_tokens if window is None else min(num_tokens, window + max_step_tokens + 2 * size)
        blocks = -(-held // size)
        total += min(blocks, STATE_BLOCKS) if group.spec.is_state else blocks
    return total


def make_kv_cache_configs(
    ranks: Sequence[Mapping[str, KVCacheSpec]],
    available_bytes: Sequence[int],
    *,
    max_model_len: int,
    max_step_tokens: int,
    is_measured: bool,
    utilization: float | None = None,
    max_num_seqs: int = 0,
    usual_sequence_len: int | None = None,
    host_pool_bytes: int = 0,
    num_blocks: int | None = None,
    contents: bytes = b"",
    num_ahead_tokens: int = 0,
) -> list[KVCacheConfig]:
    """Returns one config for each rank. All ranks use the same block ids, so all have the same number of blocks: as many as fit
    on the rank on which the fewest blocks fit.

    If `usual_sequence_len` is set, there are at most as many blocks as `max_num_seqs` sequences of this length need, but always
    enough for one sequence of `max_model_len` tokens.

    Args:
        ranks: for each rank: layer name -> spec.
        available_bytes: for each rank: the memory for the cache. Negative if the weights and the working memory of a step are
            too large even without a cache.
        is_measured: True if `available_bytes` was measured, False if the user has set it.
        utilization: `gpu_memory_utilization`, for the text of the error.
        num_blocks: the number of blocks that an engine before this one had; then nothing else decides it.
        host_pool_bytes: host memory for more blocks, all ranks together.
        contents, num_ahead_tokens: see `KVCacheConfig`.

    Raises:
        OutOfMemoryError: the host pool is too small, or one sequence of `max_model_len` tokens does not fit. If a shorter
            sequence fits, the message contains its length.
    """
    groups_of_rank = make_groups(ranks)
    block_bytes = [
        max(len(group.layer_names) * group.spec.block_bytes for group in groups) for groups in groups_of_rank
    ]
    fitting = [max(0, available) // size for available, size in zip(available_bytes, block_bytes, strict=True)]
    groups = groups_of_rank[0]
    tightest = fitting.index(min(fitting))
    max_step_tokens += num_ahead_tokens
    num_tokens = max_model_len + num_ahead_tokens
    needed = 1 + blocks_per_sequence(groups, num_tokens=num_tokens, max_step_tokens=max_step_tokens)
    count, size = fitting[tightest], block_bytes[tightest]
    if num_blocks is not None:
        count = num_blocks
    elif count < needed:
        config = KVCacheConfig(num_blocks=count, block_bytes=size, groups=groups)
        sequence = f"one sequence of max_model_len={max_model_len} tokens needs {_size(needed * size)}"
        raise OutOfMemoryError(
            _too_small(config, available_bytes[tightest], sequence, needed * size, is_measured, utilization)
        )
    if usual_sequence_len is not None and num_blocks is None:
        usual = blocks_per_sequence(groups, num_tokens=usual_sequence_len, max_step_tokens=max_step_tokens)
        count = min(count, max(needed, 1 + max_num_seqs * usual))
    num_slots = host_pool_bytes // sum(block_bytes)
    if host_pool_bytes and num_slots < MIN_SLOTS:
        raise OutOfMemoryError(
            f"kv_offloading_size (cpu_bytes_to_use) is {_size(host_pool_bytes)}, but {MIN_SLOTS} blocks, the fewest, need "
            f"{_size(MIN_SLOTS * sum(block_bytes))}; raise it"
        )
    return [
        KVCacheConfig(
            num_blocks=count,
            block_bytes=size,
            groups=groups,
            num_slots=num_slots,
            contents=contents,
            num_ahead_tokens=num_ahead_tokens,
        )
        for size, groups in zip(block_bytes, groups_of_rank, strict=True)
    ]


def describe_size(config: KVCacheConfig, cache: CacheConfig, scheduler: SchedulerConfig) -> str:
    """Returns a log line with the size of a rank's cache, the reason for this size, and the option that changes the size."""
    size = f"the KV cache of a rank is {_size(config.total_bytes)}, {config.num_tokens} tokens"
    if cache.num_blocks is not None:
        return f"{size}, as before"
    if cache.memory_bytes is not None:
        return f"{size}, as set by kv_cache_memory_bytes"
    why = f"which is what gpu_memory_utilization={cache.memory_utilization:g} leaves"
    if (length := cache.usual_sequence_len) is not None:
        usual = blocks_per_sequence(config.groups, num_tokens=length, max_step_tokens=scheduler.max_num_batched_tokens)
        if config.num_blocks > scheduler.max_num_seqs * usual:
            why = f"enough for max_num_seqs={scheduler.max_num_seqs} sequences of {length} tokens"
    return f"{size}, {why}; kv_cache_memory_bytes (--kv-cache-memory-bytes) sets another size"


def _too_small(
    config: KVCacheConfig, available: int, needed: str, enough: int, is_measured: bool, utilization: float | None
) -> str:
    """Returns the text of the error: why a cache with this `config` is too small, and what the user can change. `needed` is
    the part of the text that says what does not fit, and `enough` bytes are a cache into which it fits."""
    if not is_measured:
        room = f"kv_cache_memory_bytes gives the KV cache {_size(available)}"
        ways = ["raise kv_cache_memory_bytes"]
    else:
        room = (
            f"the KV cache has {_size(available)}, which is what gpu_memory_utilization leaves beside the weights and a step's "
            "working memory"
        )
        if available <= 0:
            room = (
                f"the KV cache has no room: the weights and a step's working memory need {_size(-available)} more than "
                "gpu_memory_utilization allows"
            )
        share = "gpu_memory_utilization" if utilization is None else f"gpu_memory_utilization={utilization:g}"
        ways = [
            f"raise {share}, or set kv_cache_memory_bytes={enough} (--kv-cache-memory-bytes, {_size(enough)})",
            "lower max_num_batched_tokens or max_num_seqs (the working memory)",
            "set quantization (the weights) or kv_cache_dtype",
            "raise tensor_parallel_size",
            "free memory",
        ]
    if config.num_blocks > len(config.groups):
        ways.insert(0, f"lower max_model_len to {config.num_tokens}")
    else:
        count = len(config.groups) + 1
        needed += f", and even one token needs {count} blocks of {_size(config.block_bytes)}, one of them a dummy"
    advice = f"{', '.join(ways[:-1])}, or {ways[-1]}" if len(ways) > 1 else ways[0]
    return f"{room}, but {needed}; {advice}"


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"


def allocate_kv_cache(config: EngineConfig, executor: Executor) -> KVCacheConfig:
    """Allocate the caches of all ranks. All have the same number of blocks. Returns the configuration of the cache of rank 0.

    Raises:
        OutOfMemoryError: one sequence of `max_model_len` tokens does not fit.
        EngineError: a rank failed.
    """
    start = time.perf_counter()
    transfer = config.cache.transfer
    specs = executor.get_kv_cache_specs()
    if config.cache.num_blocks is not None:
        available = [0] * len(specs)
    elif config.cache.memory_bytes is not None:
        available = [config.cache.memory_bytes] * len(specs)
    else:
        available = executor.determine_available_memory()
    kv_cache_configs = make_kv_cache_configs(
        specs,
        available,
        max_model_len=config.model.max_model_len,
        max_step_tokens=config.scheduler.max_num_batched_tokens,
        is_measured=config.cache.memory_bytes is None,
        utilization=config.cache.memory_utilization,
        max_num_seqs=config.scheduler.max_num_seqs,
        usual_sequence_len=config.cache.usual_sequence_len,
        num_blocks=config.cache.num_blocks,
        host_pool_bytes=transfer.cpu_bytes if transfer is not None else 0,
        num_ahead_tokens=config.speculative.num_speculative_tokens if config.speculative and config.draft_model else 0,
        contents=contents_of(config.model, config.draft_model) if transfer is not None and transfer.tiers else b"",
    )
    sized = time.perf_counter()
    logger.info("%s", describe_size(kv_cache_configs[0], config.cache, config.scheduler))
    executor.initialize_from_config(kv_cache_configs)
    logger.debug("the free memory was measured in %.2f s", sized - start)
    logger.debug("the KV cache was allocated, and a first step was run, in %.2f s", time.perf_counter() - sized)
    return kv_cache_configs[0]
