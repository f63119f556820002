"""Sizes of blocks, how many tokens fit into a cache, and the groups that layers form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.interface.kv_cache import STATE_BLOCKS, KVCacheConfig, KVCacheGroup, KVCacheSpec, count_groups

FULL = KVCacheSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4)
WINDOW = replace(FULL, sliding_window=64)
STATE = KVCacheSpec.of_state(16, 4096)


def test_bytes_of_a_block() -> None:
    assert FULL.block_bytes == 16 * 2 * 2 * 8 * 4
    assert replace(FULL, has_values=False).block_bytes == FULL.block_bytes // 2
    assert replace(FULL, itemsize=1, scale_bytes=4).bytes_per_token == 2 * 2 * (8 + 4)
    assert not FULL.is_state


def test_a_recurrent_state() -> None:
    assert STATE.is_state
    assert (STATE.block_size, STATE.block_bytes, STATE.bytes_per_token) == (16, 4096, 0)
    assert (STATE.sliding_window, STATE.itemsize, STATE.num_kv_heads, STATE.head_dim) == (2, 1, 0, 0)
    assert STATE.num_states == FULL.num_states == 1
    assert KVCacheSpec.of_state(16, 1).is_state
    assert KVCacheSpec.of_state(16, 4096, num_states=3).block_bytes == 3 * 4096


@pytest.mark.parametrize(
    ("num_blocks", "specs", "num_tokens"),
    [
        (101, [FULL], 1600),
        (101, [FULL, WINDOW], 800),
        (102, [FULL, WINDOW], 800),  # each group needs a block for the last tokens
        (101 + STATE_BLOCKS, [FULL, STATE], 1600),
        (101 + 2 * STATE_BLOCKS, [FULL, STATE, STATE], 1600),
        (101 + STATE_BLOCKS, [STATE], 1600),
        (1, [FULL], 0),
        (1, [FULL, STATE], 0),
    ],
)
def test_how_many_tokens_fit(num_blocks: int, specs: list[KVCacheSpec], num_tokens: int) -> None:
    groups = tuple(KVCacheGroup(layer_names=(str(i),), spec=spec) for i, spec in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks, block_bytes=10, groups=groups)
    assert config.num_tokens == num_tokens
    assert config.total_bytes == 10 * num_blocks


HALF = replace(WINDOW, num_kv_heads=1)
SMALL_STATE, LARGE_STATE = (
    KVCacheSpec.of_state(16, FULL.block_bytes // 2),
    KVCacheSpec.of_state(16, 5 * FULL.block_bytes),
)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({FULL: 12}, {FULL: 1}),
        ({FULL: 2, WINDOW: 10}, {FULL: 1, WINDOW: 5}),
        ({FULL: 2, WINDOW: 11}, {FULL: 1, WINDOW: 6}),
        ({FULL: 2, HALF: 10}, {FULL: 1, HALF: 3}),  # four layers of half the size fit into a block
        ({FULL: 3, STATE: 9}, {FULL: 1, STATE: -(-9 // (3 * FULL.block_bytes // 4096))}),
        ({FULL: 2, SMALL_STATE: 9}, {FULL: 1, SMALL_STATE: 3}),
        ({FULL: 2, LARGE_STATE: 3}, {FULL: 1, LARGE_STATE: 3}),  # at least one layer to a group
        ({STATE: 5}, {STATE: 5}),
    ],
)
def test_groups(layers: dict[KVCacheSpec, int], expected: dict[KVCacheSpec, int]) -> None:
    assert count_groups(spec for spec, count in layers.items() for _ in range(count)) == expected
