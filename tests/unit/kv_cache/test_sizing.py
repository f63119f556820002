"""Grouping of layers and the number of blocks."""

from __future__ import annotations

import pytest

from inflight.errors import OutOfMemoryError
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kv_cache.sizing import blocks_per_sequence, make_groups, make_kv_cache_configs


def spec(window: int | None = None) -> KVCacheSpec:
    return KVCacheSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4, sliding_window=window)


def test_layers_of_one_kind_are_one_group() -> None:
    [(group,)] = make_groups([{f"layers.{i}": spec() for i in range(5)}])
    assert group.layer_names == tuple(f"layers.{i}" for i in range(5))


def test_two_kinds_are_cut_into_groups_of_the_smaller_size() -> None:
    specs = {f"layers.{i}": spec(None if i % 4 == 3 else 32) for i in range(12)}  # 9 windowed, 3 full
    (groups,) = make_groups([specs])
    assert [(len(group.layer_names), group.spec.sliding_window) for group in groups] == [(3, 32)] * 3 + [(3, None)]
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)


def test_as_many_blocks_as_fit() -> None:
    specs = {"a": spec(), "b": spec()}
    block_bytes = 2 * spec().block_bytes
    (config,) = make_kv_cache_configs([specs], [10 * block_bytes + 1], max_model_len=100, max_step_tokens=64)
    assert (config.num_blocks, config.block_bytes) == (10, block_bytes)
    assert config.total_bytes <= 10 * block_bytes + 1


def test_a_window_bounds_what_a_sequence_holds() -> None:
    (groups,) = make_groups([{"a": spec(window=32)}])
    assert blocks_per_sequence(groups, num_tokens=10_000, max_step_tokens=64) == (32 + 64 + 32) // 16


def test_too_little_memory_says_what_would_fit() -> None:
    specs = {"a": spec()}
    with pytest.raises(OutOfMemoryError, match=r"max_model_len=1000 .*lower max_model_len to 144"):
        make_kv_cache_configs([specs], [10 * spec().block_bytes], max_model_len=1000, max_step_tokens=64)
    with pytest.raises(OutOfMemoryError, match="not even one block"):
        make_kv_cache_configs([specs], [spec().block_bytes - 1], max_model_len=1000, max_step_tokens=64)
    with pytest.raises(OutOfMemoryError, match="not even one block"):
        make_kv_cache_configs([specs], [-5], max_model_len=1000, max_step_tokens=64)


def test_stages_agree_on_the_groups_whatever_layers_they_have() -> None:
    """9 windowed layers and 3 full ones, all of these on the second of three stages; two ranks each."""
    specs = {f"layers.{i}": spec(None if i in (4, 6, 7) else 32) for i in range(12)}
    stages = [dict(list(specs.items())[start : start + 4]) for start in (0, 4, 8)]
    (whole,), ranks = make_groups([specs]), make_groups([stage for stage in stages for _ in range(2)])
    for groups, stage in zip(ranks, [stage for stage in stages for _ in range(2)], strict=True):
        assert [group.spec for group in groups] == [group.spec for group in whole]
        assert sorted(name for group in groups for name in group.layer_names) == sorted(stage)
    assert [len(group.layer_names) for group in ranks[0]] == [2, 2, 0, 0]
    configs = make_kv_cache_configs(stages, [200_000] * 3, max_model_len=64, max_step_tokens=64)
    assert [config.block_bytes // spec().block_bytes for config in configs] == [2, 3, 2]
    assert {config.num_blocks for config in configs} == {200_000 // (3 * spec().block_bytes)}


def test_the_tightest_rank_decides() -> None:
    stages = [{"a": spec(), "b": spec()}, {"c": spec()}]
    block = spec().block_bytes
    configs = make_kv_cache_configs(stages, [40 * block, 15 * block], max_model_len=16, max_step_tokens=16)
    assert [config.num_blocks for config in configs] == [15, 15]
    with pytest.raises(OutOfMemoryError, match=r"the KV cache has 0\.0 MiB"):
        make_kv_cache_configs(stages, [40 * block, block], max_model_len=160, max_step_tokens=16)
