"""Grouping of layers and the number of blocks."""

from __future__ import annotations

import pytest

from inflight.errors import OutOfMemoryError
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kv_cache.sizing import blocks_per_sequence, make_groups, make_kv_cache_config


def spec(window: int | None = None) -> KVCacheSpec:
    return KVCacheSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4, sliding_window=window)


def test_layers_of_one_kind_are_one_group() -> None:
    (group,) = make_groups({f"layers.{i}": spec() for i in range(5)})
    assert group.layer_names == tuple(f"layers.{i}" for i in range(5))


def test_two_kinds_are_cut_into_groups_of_the_smaller_size() -> None:
    specs = {f"layers.{i}": spec(None if i % 4 == 3 else 32) for i in range(12)}  # 9 windowed, 3 full
    groups = make_groups(specs)
    assert [(len(group.layer_names), group.spec.sliding_window) for group in groups] == [(3, 32)] * 3 + [(3, None)]
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)


def test_as_many_blocks_as_fit() -> None:
    specs = {"a": spec(), "b": spec()}
    block_bytes = 2 * spec().block_bytes
    config = make_kv_cache_config(specs, 10 * block_bytes + 1, max_model_len=100, max_step_tokens=64)
    assert (config.num_blocks, config.block_bytes) == (10, block_bytes)
    assert config.total_bytes <= 10 * block_bytes + 1


def test_a_window_bounds_what_a_sequence_holds() -> None:
    groups = make_groups({"a": spec(window=32)})
    assert blocks_per_sequence(groups, num_tokens=10_000, max_step_tokens=64) == (32 + 64 + 32) // 16


def test_too_little_memory_says_what_would_fit() -> None:
    specs = {"a": spec()}
    with pytest.raises(OutOfMemoryError, match=r"max_model_len=1000 .*lower max_model_len to 144"):
        make_kv_cache_config(specs, 10 * spec().block_bytes, max_model_len=1000, max_step_tokens=64)
    with pytest.raises(OutOfMemoryError, match="not even one block"):
        make_kv_cache_config(specs, spec().block_bytes - 1, max_model_len=1000, max_step_tokens=64)
    with pytest.raises(OutOfMemoryError, match="not even one block"):
        make_kv_cache_config(specs, -5, max_model_len=1000, max_step_tokens=64)
