"""From the layers' specs and the bytes at hand to a `KVCacheConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inflight.errors import OutOfMemoryError
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec


def make_groups(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers of equal spec, cut into groups of one size, so that every group's block has equally many bytes.

    The size is that of the smallest kind; a group that cannot be filled is short, and its blocks are padded.
    """
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    size = min(len(names) for names in kinds.values())
    return tuple(
        KVCacheGroup(layer_names=tuple(names[i : i + size]), spec=spec)
        for spec, names in kinds.items()
        for i in range(0, len(names), size)
    )


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


def make_kv_cache_config(
    specs: Mapping[str, KVCacheSpec], available_bytes: int, *, max_model_len: int, max_step_tokens: int
) -> KVCacheConfig:
    """As many blocks as fit.

    Raises:
        OutOfMemoryError: one sequence of `max_model_len` tokens would not fit; says which length would.
    """
    groups = make_groups(specs)
    block_bytes = max(len(group.layer_names) * group.spec.block_bytes for group in groups)
    num_blocks = max(0, available_bytes) // block_bytes
    needed = 1 + blocks_per_sequence(groups, num_tokens=max_model_len, max_step_tokens=max_step_tokens)
    if num_blocks < needed:
        raise OutOfMemoryError(_too_small(groups, block_bytes, num_blocks, needed, available_bytes, max_model_len))
    return KVCacheConfig(num_blocks=num_blocks, block_bytes=block_bytes, groups=groups)


def _too_small(
    groups: Sequence[KVCacheGroup], block_bytes: int, num_blocks: int, needed: int, available: int, max_model_len: int
) -> str:
    what = (
        f"the KV cache has {max(0, available) / 2**20:.1f} MiB, but one sequence of max_model_len={max_model_len} tokens needs "
        f"{needed * block_bytes / 2**20:.1f} MiB"
    )
    if num_blocks < 1 + len(groups):
        what += f" and not even one block ({block_bytes / 2**20:.2f} MiB, plus a dummy block) fits"
        fits = ""
    else:
        fits = f"lower max_model_len to {(num_blocks - 1) // len(groups) * groups[0].spec.block_size}, "
    return f"{what}; {fits}raise kv_cache_memory_bytes or gpu_memory_utilization, lower max_num_batched_tokens, or free memory"
