"""`CacheGroup`: which blocks the next token sees. tests/unit/kv_cache/test_manager.py tests the rest of `CacheGroup`."""

from __future__ import annotations

import pytest

from inflight.interface.kv_cache import KVCacheSpec
from inflight.kv_cache.block_pool import BlockPool
from inflight.kv_cache.groups import CacheGroup


@pytest.mark.parametrize("size", [1, 4])  # block sizes; a user may give 1 or more
@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 9])
def test_the_first_block_that_a_token_sees(size: int, window: int | None) -> None:
    """It sees itself and the `window - 1` tokens before it."""
    spec = KVCacheSpec(block_size=size, num_kv_heads=1, head_dim=1, dtype="float32", itemsize=4, sliding_window=window)
    group = CacheGroup(0, spec, BlockPool(2))
    for position in range(20):
        seen = [other for other in range(position + 1) if window is None or position - other < window]
        assert group.first_live_block(position) == seen[0] // size, position
