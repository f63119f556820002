"""How much memory the KV cache may take: the size that the user sets, or a default that leaves memory to other programs."""

from __future__ import annotations

from inflight.config.engine import CacheConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.errors import OutOfMemoryError

DEFAULT_BLOCK_SIZE = 16
# On a CPU, other programs use the same memory. A GPU's memory is for the engine alone.
DEFAULT_MEMORY_UTILIZATION = {"cpu": 0.5, "cuda": 0.9}
# The default cache has room for max_num_seqs requests of this many tokens, prompt and output together. Most chats are shorter.
# No block is set aside for a request in advance, so a longer request uses blocks that shorter requests do not need.
USUAL_SEQUENCE_LEN = 1024


def resolve_cache(args: EngineArgs, *, max_model_len: int, dtype: str, machine: Machine) -> CacheConfig:
    """
    Args:
        dtype: the dtype of keys and values.
    """
    is_sized_by_user = args.kv_cache_memory_bytes is not None or args.gpu_memory_utilization is not None
    is_shared = machine.device == "cpu" and not is_sized_by_user
    return CacheConfig(
        block_size=args.block_size or DEFAULT_BLOCK_SIZE,
        dtype=dtype,
        enable_prefix_caching=args.enable_prefix_caching,
        memory_bytes=args.kv_cache_memory_bytes,
        memory_utilization=args.gpu_memory_utilization or DEFAULT_MEMORY_UTILIZATION[machine.device],
        usual_sequence_len=min(max_model_len, USUAL_SEQUENCE_LEN) if is_shared else None,
    )


def check_kv_cache_fits(memory_bytes: int, *, weight_bytes: int, num_sharing: int, free_bytes: int) -> None:
    """
    Args:
        memory_bytes: what `kv_cache_memory_bytes` asks for on each rank.
        weight_bytes: size of the weights of a rank.
        num_sharing: number of ranks that share the memory.
        free_bytes: free memory before anything is loaded.

    Raises:
        OutOfMemoryError: the memory cannot hold the weights and a cache of this size.
    """
    if num_sharing * (memory_bytes + weight_bytes) <= free_bytes:
        return
    room = free_bytes // num_sharing - weight_bytes
    ways = [f"lower it to {_size(room)} at most", "free memory"] if room > 0 else ["free memory", "use a smaller model"]
    sharing = f", which {num_sharing} ranks share" if num_sharing > 1 else ""
    raise OutOfMemoryError(
        f"kv_cache_memory_bytes={memory_bytes} (--kv-cache-memory-bytes) asks for a KV cache of {_size(memory_bytes)} beside "
        f"{_size(weight_bytes)} of weights, but only {_size(free_bytes)} of memory is free{sharing}; {ways[0]}, {ways[1]}, or "
        "leave it out: then the size follows from the free memory"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
