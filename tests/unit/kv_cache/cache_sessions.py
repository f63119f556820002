"""Requests that one engine after another computes, on a `KVCacheManager` alone: how many tokens of each prompt are found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.request import Int32Array
from inflight.kv_cache.manager import KVCacheManager
from inflight.kv_cache.request_blocks import RequestBlocks

BLOCK = 16
STATE = 0  # in place of a window: recurrent layers


def make_cache(num_blocks: int, windows: Sequence[int | None]) -> KVCacheManager:
    """A group for each window. `num_blocks` can be given out."""
    specs = [
        KVCacheSpec.of_state(BLOCK, 16)
        if window == STATE
        else KVCacheSpec(
            block_size=BLOCK, num_kv_heads=1, head_dim=1, dtype="float32", itemsize=4, sliding_window=window
        )
        for window in windows
    ]
    groups = tuple(KVCacheGroup(layer_names=(str(i),), spec=spec) for i, spec in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks + 1, block_bytes=64, groups=groups)
    return KVCacheManager(config, fingerprint="m", enable_prefix_caching=True)


def admit(cache: KVCacheManager, prompt: Int32Array) -> tuple[RequestBlocks, int]:
    """Returns the request and the number of tokens that were found. Nothing of it is computed."""
    blocks = cache.new_request("", len(prompt))
    found = cache.get_computed_blocks(blocks, prompt)
    num_found = len(found[0])
    assert cache.allocate_slots(blocks, len(prompt), found) is not None
    blocks.num_committed = num_found
    return blocks, num_found * BLOCK


def finish(cache: KVCacheManager, blocks: RequestBlocks, tokens: Int32Array, num_prompt: int) -> None:
    """Compute the prompt in one step, and then the answer token by token."""
    if cache.has_full_blocks(blocks, num_prompt):
        cache.commit(blocks, tokens, num_prompt)
    for end in range(num_prompt + 1, len(tokens)):
        assert cache.allocate_slots(blocks, end) is not None
        if cache.has_full_blocks(blocks, end):
            cache.commit(blocks, tokens, end)
    cache.name_last_state(blocks)
    cache.free(blocks)


def ask(cache: KVCacheManager, prompt: Int32Array, answer: Int32Array) -> int:
    """Returns how many tokens of the prompt were found."""
    blocks, num_found = admit(cache, prompt)
    finish(cache, blocks, np.concatenate([prompt, answer]), len(prompt))
    return num_found


def text(seed: int, count: int) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 1 << 20, count, dtype=np.int32)
