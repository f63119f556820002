"""From the layers' specs and the bytes at hand to a `KVCacheConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inflight.config.engine import CacheConfig, SchedulerConfig
from inflight.errors import OutOfMemoryError
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, count_groups


def make_groups(ranks: Sequence[Mapping[str, KVCacheSpec]]) -> list[tuple[KVCacheGroup, ...]]:
    """Layers of equal spec, cut into groups of about one size, so that a block of every group has about equally many bytes.

    A request has one block table per group on all ranks: each rank gets as many groups of a kind as the whole model needs, and
    divides the layers that it has of the kind among them; a group may have none there. The size is that of the smallest kind;
    blocks of smaller groups are padded.

    Args:
        ranks: layer name -> spec, of each rank.
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
    return [KVCacheGroup(layer_names=tuple(names[i * size : (i + 1) * size]), spec=kind) for i in range(count)]


def blocks_per_sequence(groups: Sequence[KVCacheGroup], *, num_tokens: int, max_step_tokens: int) -> int:
    """Blocks that one sequence of `num_tokens` holds at most, over all groups.

    A windowed group holds the window and the step being written, however long the sequence.
    """
    total = 0
    for group in groups:
        size, window = group.spec.block_size, group.spec.sliding_window
        held = num_tokens if window is None else min(num_tokens, window + max_step_tokens + 2 * size)
        total += -(-held // size)
    return total


def make_kv_cache_configs(
    ranks: Sequence[Mapping[str, KVCacheSpec]],
    available_bytes: Sequence[int],
    *,
    max_model_len: int,
    max_step_tokens: int,
    is_measured: bool,
    max_num_seqs: int = 0,
    usual_sequence_len: int | None = None,
) -> list[KVCacheConfig]:
    """As many blocks as fit, one config per rank. One pool of block ids serves all ranks: the tightest one decides how many.

    If `usual_sequence_len` is set, at most what `max_num_seqs` sequences of this many tokens need, or one of `max_model_len`.

    Args:
        ranks: layer name -> spec, of each rank.
        available_bytes: of each rank. Negative where the weights and a step alone are too much.
        is_measured: they are what is left of the device's memory; else what the user has set.

    Raises:
        OutOfMemoryError: one sequence of `max_model_len` tokens would not fit; says which length would.
    """
    groups_of_rank = make_groups(ranks)
    block_bytes = [
        max(len(group.layer_names) * group.spec.block_bytes for group in groups) for groups in groups_of_rank
    ]
    num_blocks = [max(0, available) // size for available, size in zip(available_bytes, block_bytes, strict=True)]
    groups, tightest = groups_of_rank[0], num_blocks.index(min(num_blocks))
    needed = 1 + blocks_per_sequence(groups, num_tokens=max_model_len, max_step_tokens=max_step_tokens)
    if num_blocks[tightest] < needed:
        size, available = block_bytes[tightest], available_bytes[tightest]
        room = f"{_room(available, is_measured)}, but one sequence of max_model_len={max_model_len} tokens needs "
        room += _size(needed * size)
        raise OutOfMemoryError(f"{room}{_advice(groups, size, num_blocks[tightest], is_measured)}")
    count = num_blocks[tightest]
    if usual_sequence_len is not None:
        usual = blocks_per_sequence(groups, num_tokens=usual_sequence_len, max_step_tokens=max_step_tokens)
        count = min(count, max(needed, 1 + max_num_seqs * usual))
    return [
        KVCacheConfig(num_blocks=count, block_bytes=size, groups=groups)
        for size, groups in zip(block_bytes, groups_of_rank, strict=True)
    ]


def describe_size(config: KVCacheConfig, cache: CacheConfig, scheduler: SchedulerConfig) -> str:
    """For the log: how large the cache of a rank is, why, and which option changes it."""
    size = f"the KV cache of a rank is {_size(config.total_bytes)}, {num_tokens_held(config)} tokens"
    if cache.memory_bytes is not None:
        return f"{size}, as kv_cache_memory_bytes says"
    why = f"which is what gpu_memory_utilization={cache.memory_utilization:g} leaves"
    if (length := cache.usual_sequence_len) is not None:
        usual = blocks_per_sequence(config.groups, num_tokens=length, max_step_tokens=scheduler.max_num_batched_tokens)
        if config.num_blocks > scheduler.max_num_seqs * usual:
            why = f"enough for max_num_seqs={scheduler.max_num_seqs} sequences of {length} tokens"
    return f"{size}, {why}; kv_cache_memory_bytes (--kv-cache-memory-bytes) sets another size"


def num_tokens_held(config: KVCacheConfig) -> int:
    """Tokens that the KV cache can hold, if no layer has a window."""
    return (config.num_blocks - 1) // len(config.groups) * config.groups[0].spec.block_size


def _room(available: int, is_measured: bool) -> str:
    if not is_measured:
        return f"kv_cache_memory_bytes gives the KV cache {_size(available)}"
    if available <= 0:
        return (
            f"the KV cache has no room: the weights and a step's working memory take {_size(-available)} more than "
            "gpu_memory_utilization lets the engine use"
        )
    return (
        f"the KV cache has {_size(available)}, which is what gpu_memory_utilization leaves beside the weights and a step's "
        "working memory"
    )


def _advice(groups: Sequence[KVCacheGroup], block_bytes: int, num_blocks: int, is_measured: bool) -> str:
    what, ways = "", []
    if num_blocks < 1 + len(groups):
        what = f", and not even one block ({_size(block_bytes)}, plus a dummy block) fits"
    else:
        ways.append(f"lower max_model_len to {(num_blocks - 1) // len(groups) * groups[0].spec.block_size}")
    if is_measured:
        ways += [
            "raise gpu_memory_utilization",
            "lower max_num_batched_tokens or max_num_seqs (the working memory)",
            "set quantization (the weights) or kv_cache_dtype",
            "raise tensor_parallel_size",
            "free memory",
        ]
    else:
        ways.append("raise kv_cache_memory_bytes")
    return f"{what}; {', '.join(ways[:-1])}, or {ways[-1]}" if len(ways) > 1 else f"{what}; {ways[0]}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
