"""`CacheGroup` and `WindowGroup`: which blocks the next token sees. test_manager.py and test_window_group.py have the rest."""

from __future__ import annotations

import pytest

from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.kv_cache.block_pool import BlockPool
from inflight.kv_cache.groups import CacheGroup
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.kv_cache.window_group import make_groups


@pytest.mark.parametrize("size", [1, 4])  # block sizes; a user may give 1 or more
@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 9])
def test_the_first_block_that_a_token_sees(size: int, window: int | None) -> None:
    """It sees itself and the `window - 1` tokens before it."""
    group, _ = make_group(window, size=size, index=0)
    for position in range(20):
        seen = [other for other in range(position + 1) if window is None or position - other < window]
        assert group.first_live_block(position) == seen[0] // size, position


def make_group(
    window: int | None, *, size: int = 4, index: int = 1, num_blocks: int = 20
) -> tuple[CacheGroup, BlockPool]:
    spec = KVCacheSpec(block_size=size, num_kv_heads=1, head_dim=1, dtype="float32", itemsize=4, sliding_window=window)
    pool, groups = (
        BlockPool(num_blocks),
        tuple(KVCacheGroup(layer_names=(str(i),), spec=spec) for i in range(index + 1)),
    )
    return make_groups(KVCacheConfig(num_blocks=num_blocks, block_bytes=64, groups=groups), pool)[index], pool


NAMES = [bytes([65 + i]) for i in range(8)]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 7])
def test_the_longest_hit_is_the_longest_prefix_whose_visible_blocks_are_all_cached(
    size: int, window: int | None
) -> None:
    group, _ = make_group(window, size=size)
    for cached in range(1 << 6):
        for limit in range(7):
            hits = [
                count
                for count in range(limit + 1)
                if all(
                    cached >> (position // size) & 1
                    for position in range(count * size)
                    if window is None or count * size - position < window
                )
            ]
            asked: list[tuple[bytes, int]] = []

            def find(
                key: tuple[bytes, int], cached: int = cached, asked: list[tuple[bytes, int]] = asked
            ) -> int | None:
                asked.append(key)
                return 0 if cached >> NAMES.index(key[0]) & 1 else None  # block 0 counts, too

            assert group.longest_hit(NAMES, limit, find) == hits[-1], (cached, limit)
            assert all(index == 1 for _, index in asked)


@pytest.mark.parametrize(("window", "first"), [(None, 0), (9, 1), (5, 2), (2, 2), (1, 3)])
def test_of_a_cached_prefix_only_the_blocks_in_the_window_are_needed(window: int | None, first: int) -> None:
    group, pool = make_group(window)
    blocks = pool.allocate(8)
    for block_id, name in zip(blocks, NAMES, strict=True):
        group.name(block_id, name)
    assert group.needed_keys(NAMES, 3) == [(name, 1) for name in NAMES[first:3]]
    assert group.cached_table(NAMES, 3) == [0] * first + blocks[first:3]
    assert group.shared_table(blocks, 3) == [0] * first + blocks[first:3]
    for freed in range(8) if window else ():  # full attention frees nothing
        table = [0 if i == freed else block_id for i, block_id in enumerate(blocks)]
        expected = None if first <= freed < 3 else [0] * first + blocks[first:3]
        assert group.shared_table(table, 3) == expected, freed
    assert make_group(window, index=0)[0].key(b"A") == (b"A", 0)


@pytest.mark.parametrize(
    ("window", "committed", "computed", "left"),
    [
        (None, 0, 24, range(0)),
        (5, 0, 4, range(0)),
        (5, 0, 7, range(0)),
        (5, 0, 8, range(1)),
        (5, 0, 15, range(2)),
        (5, 3, 16, range(2, 3)),  # the first two have left before
        (5, 3, 12, range(0)),
        (1, 1, 11, range(1, 2)),
    ],
)
def test_blocks_that_leave_the_window_are_freed_and_the_dummy_takes_their_places(
    window: int | None, committed: int, computed: int, left: range
) -> None:
    group, pool = make_group(window)
    blocks = pool.allocate(6)
    table, free = list(blocks), pool.num_free_blocks
    group.leave_window(RequestBlocks((table,), b"", num_committed=committed), table, computed)
    assert table == [0 if i in left else block_id for i, block_id in enumerate(blocks)]
    assert pool.num_free_blocks == free + len(left)
