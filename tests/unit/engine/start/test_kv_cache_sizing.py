"""Grouping of layers and the number of blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config.engine import CacheConfig, SchedulerConfig
from inflight.engine.start.kv_cache_sizing import blocks_per_sequence, describe_size, make_groups, make_kv_cache_configs
from inflight.errors import OutOfMemoryError
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.kv_cache.manager import KVCacheManager


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


def test_a_group_has_as_many_layers_as_fit_into_the_common_block() -> None:
    """Four layers with attention, of 4 units each, and layers of a smaller kind and states: a block has 16 units."""
    unit = spec().block_bytes // 4
    small = replace(spec(32), head_dim=spec().head_dim // 4)
    specs = {f"full.{i}": spec() for i in range(4)} | {f"small.{i}": small for i in range(18)}
    specs |= {f"state.{i}": KVCacheSpec.of_state(16, 5 * unit) for i in range(7)}
    (groups,) = make_groups([specs])
    assert [len(group.layer_names) for group in groups] == [4, 9, 9, 3, 3, 1]
    large = {f"full.{i}": spec() for i in range(4)} | {
        f"state.{i}": KVCacheSpec.of_state(16, 99 * unit) for i in range(3)
    }
    assert [len(group.layer_names) for group in make_groups([large])[0]] == [4, 1, 1, 1]


def test_a_recurrent_layer_needs_three_blocks() -> None:
    """A step reads the one of a cached prefix, and writes two others."""
    (groups,) = make_groups([{"a": spec(), "b": KVCacheSpec.of_state(16, spec().block_bytes)}])
    assert blocks_per_sequence(groups, num_tokens=160, max_step_tokens=64) == 10 + 3
    config = KVCacheConfig(num_blocks=14, block_bytes=1, groups=groups)
    assert config.num_tokens == 160


def test_as_many_blocks_as_fit() -> None:
    specs = {"a": spec(), "b": spec()}
    block_bytes = 2 * spec().block_bytes
    (config,) = make_kv_cache_configs(
        [specs], [10 * block_bytes + 1], max_model_len=100, max_step_tokens=64, is_measured=True
    )
    assert (config.num_blocks, config.block_bytes) == (10, block_bytes)
    assert config.total_bytes <= 10 * block_bytes + 1


def test_no_more_than_the_usual_sequences_need() -> None:
    specs, block = [{"a": spec()}], spec().block_bytes

    def num_blocks(available: int, length: int, usual: int | None) -> int:
        (config,) = make_kv_cache_configs(
            specs,
            [available * block],
            max_model_len=length,
            max_step_tokens=64,
            is_measured=True,
            max_num_seqs=8,
            usual_sequence_len=usual,
        )
        return config.num_blocks

    assert num_blocks(1000, 160, None) == 1000
    assert num_blocks(1000, 160, 48) == 1 + 8 * 3
    assert num_blocks(20, 160, 48) == 20  # what there is
    assert num_blocks(1000, 1600, 48) == 1 + 100  # one sequence of full length, at least


def test_the_log_says_how_large_it_is_and_why() -> None:
    groups = make_groups([{"a": spec()}])[0]
    config = KVCacheConfig(num_blocks=25, block_bytes=1 << 30, groups=groups)
    cache = CacheConfig(
        block_size=16, dtype="float32", enable_prefix_caching=True, memory_bytes=None, memory_utilization=0.5
    )
    scheduler = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, enable_chunked_prefill=True, policy="fcfs", depth=1, stagger=1
    )
    size, flag = "the KV cache of a rank is 25.00 GiB, 384 tokens, ", "--kv-cache-memory-bytes"
    usual = replace(cache, usual_sequence_len=48)
    text = describe_size(config, usual, scheduler)
    assert text.startswith(f"{size}enough for max_num_seqs=8 sequences of 48 tokens; ") and flag in text
    for other in (cache, replace(cache, usual_sequence_len=64)):
        text = describe_size(config, other, scheduler)
        assert text.startswith(f"{size}which is what gpu_memory_utilization=0.5 leaves; ") and flag in text
    given = describe_size(config, replace(cache, memory_bytes=25 << 30), scheduler)
    assert given == f"{size}as set by kv_cache_memory_bytes"


def test_a_window_bounds_what_a_sequence_holds() -> None:
    (groups,) = make_groups([{"a": spec(window=32)}])
    assert blocks_per_sequence(groups, num_tokens=10_000, max_step_tokens=64) == (32 + 64 + 32) // 16


def refusal(*available: int, specs: list[dict[str, KVCacheSpec]], length: int = 1000, is_measured: bool = True) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        make_kv_cache_configs(specs, available, max_model_len=length, max_step_tokens=64, is_measured=is_measured)
    return str(caught.value)


def test_too_little_memory_says_what_would_fit() -> None:
    specs, block = [{"a": spec()}], spec().block_bytes
    text = refusal(10 * block, specs=specs)
    assert text.startswith(
        f"the KV cache has {10 * block / 2**20:.2f} MiB, which is what gpu_memory_utilization leaves beside the weights and a "
        f"step's working memory, but one sequence of max_model_len=1000 tokens needs {64 * block / 2**20:.2f} MiB; "
        f"lower max_model_len to 144, raise gpu_memory_utilization, or set kv_cache_memory_bytes={64 * block} "
    )
    for way in ("max_num_seqs", "quantization", "kv_cache_dtype", "tensor_parallel_size", "free memory"):
        assert way in text
    assert "and even one token needs 2 blocks of" in refusal(block - 1, specs=specs)
    big = KVCacheSpec(block_size=2**16, num_kv_heads=64, head_dim=128, dtype="float32", itemsize=4)
    assert "needs 8.00 GiB, and even one token needs 2 blocks of 4.00 GiB, one" in refusal(5, specs=[{"a": big}])


def test_weights_that_leave_nothing_say_how_much_is_missing() -> None:
    text = refusal(-(3 << 29), specs=[{"a": spec()}])
    assert "the weights and a step's working memory need 1.50 GiB more than gpu_memory_utilization allows" in text
    assert "lower max_model_len" not in text


def test_a_size_that_was_given_is_what_is_to_be_raised() -> None:
    specs, block = [{"a": spec()}], spec().block_bytes
    text = refusal(10 * block, specs=specs, is_measured=False)
    assert text.startswith(f"kv_cache_memory_bytes gives the KV cache {10 * block / 2**20:.2f} MiB, but")
    assert text.endswith("; lower max_model_len to 144, or raise kv_cache_memory_bytes")
    assert refusal(5, specs=specs, is_measured=False).endswith("one of them a dummy; raise kv_cache_memory_bytes")


def test_an_engine_that_starts_again_has_as_many_blocks_as_before() -> None:
    """Whatever memory is free now, and whatever the stages need for a block."""
    stages, limits = [{"a": spec(), "b": spec()}, {"c": spec()}], {"max_model_len": 1000, "max_step_tokens": 64}
    configs = make_kv_cache_configs(stages, [0, -5], is_measured=True, num_blocks=77, **limits)
    assert [config.num_blocks for config in configs] == [77, 77]
    usual = {"max_num_seqs": 1, "usual_sequence_len": 16}
    configs = make_kv_cache_configs(stages, [0, 0], is_measured=True, num_blocks=77, **limits, **usual)
    assert [config.num_blocks for config in configs] == [77, 77]


def test_the_share_in_use_is_told() -> None:
    with pytest.raises(OutOfMemoryError, match=r"gpu_memory_utilization=0\.5.*kv_cache_memory_bytes="):
        make_kv_cache_configs(
            [{"a": spec()}], [5], max_model_len=100, max_step_tokens=64, is_measured=True, utilization=0.5
        )


def test_stages_agree_on_the_groups_whatever_layers_they_have() -> None:
    """9 windowed layers and 3 full ones, all of these on the second of three stages; two ranks each."""
    specs = {f"layers.{i}": spec(None if i in (4, 6, 7) else 32) for i in range(12)}
    stages = [dict(list(specs.items())[start : start + 4]) for start in (0, 4, 8)]
    (whole,), ranks = make_groups([specs]), make_groups([stage for stage in stages for _ in range(2)])
    for groups, stage in zip(ranks, [stage for stage in stages for _ in range(2)], strict=True):
        assert [group.spec for group in groups] == [group.spec for group in whole]
        assert sorted(name for group in groups for name in group.layer_names) == sorted(stage)
    assert [len(group.layer_names) for group in ranks[0]] == [2, 2, 0, 0]
    configs = make_kv_cache_configs(stages, [200_000] * 3, max_model_len=64, max_step_tokens=64, is_measured=True)
    assert [config.block_bytes // spec().block_bytes for config in configs] == [2, 3, 2]
    assert {config.num_blocks for config in configs} == {200_000 // (3 * spec().block_bytes)}


def test_the_tightest_rank_decides() -> None:
    stages = [{"a": spec(), "b": spec()}, {"c": spec()}]
    block = spec().block_bytes
    configs = make_kv_cache_configs(
        stages, [40 * block, 15 * block], max_model_len=16, max_step_tokens=16, is_measured=True
    )
    assert [config.num_blocks for config in configs] == [15, 15]
    assert "the KV cache has 0.00 MiB" in refusal(40 * block, block, specs=stages, length=160)


KINDS = st.fixed_dictionaries(
    {"full": st.integers(0, 2), "window": st.integers(0, 2), "state": st.integers(0, 3)}
).filter(lambda counts: sum(counts.values()) > 0)


@given(st.data())
@settings(max_examples=100)
def test_the_smallest_cache_that_starts_serves_every_sequence(data: st.DataObject) -> None:
    """Alone, in steps of any size, after cached prefixes of any length."""
    counts, window = data.draw(KINDS), data.draw(st.sampled_from([2, 5, 16, 33]))
    specs = {f"full.{i}": spec() for i in range(counts["full"])}
    specs |= {f"window.{i}": spec(window) for i in range(counts["window"])}
    specs |= {f"state.{i}": KVCacheSpec.of_state(16, spec().block_bytes) for i in range(counts["state"])}
    max_model_len, max_step = data.draw(st.integers(1, 200)), data.draw(st.sampled_from([1, 3, 16, 40, 256]))
    sizes = {"max_model_len": max_model_len, "max_step_tokens": max_step, "is_measured": False}
    (groups,) = make_groups([specs])
    block_bytes = max(len(group.layer_names) * group.spec.block_bytes for group in groups)
    needed = 1 + blocks_per_sequence(groups, num_tokens=max_model_len, max_step_tokens=max_step)
    (config,) = make_kv_cache_configs([specs], [needed * block_bytes], **sizes)  # type: ignore[arg-type]
    assert config.num_blocks == needed
    distance = data.draw(st.sampled_from([16, 48, 512]))
    manager = KVCacheManager(config, fingerprint="", enable_prefix_caching=True, checkpoint_tokens=distance)
    for _ in range(data.draw(st.integers(1, 5))):
        num_tokens, common = data.draw(st.integers(1, max_model_len)), data.draw(st.integers(0, max_model_len))
        tokens = np.arange(num_tokens, dtype=np.int32)
        tokens[common:] += data.draw(st.integers(0, 2)) * 1000
        blocks = manager.new_request("", num_tokens)
        computed = manager.get_computed_blocks(blocks, tokens)
        position = len(computed[0]) * 16 if computed else 0
        blocks.num_committed = position // 16
        while position < num_tokens:
            count = data.draw(st.integers(1, min(max_step, num_tokens - position)))
            assert manager.allocate_slots(blocks, position + count, computed) is not None, (position, count)
            computed = ()
            position += count
            if manager.has_full_blocks(blocks, position):
                manager.commit(blocks, tokens, position)
        manager.free(blocks)
