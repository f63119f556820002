"""`KVTransfers` if a tier stores several blocks as one object: what is saved together, and where blocks are looked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.interface.kv_cache import KVCacheSpec
from tests.unit.scheduler.transfer_bench import Bench, clock, tokens

__all__ = ["clock"]

CHUNKS = KVTierConfig(type="obj", url="memory:///", blocks_per_chunk=4)
SHAPE = {"block_size": 4, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32", "itemsize": 4}


def make(num_blocks: int = 100, num_slots: int = 100, **more: object) -> Bench:
    return Bench(num_blocks=num_blocks, num_slots=num_slots, **{"tiers": (CHUNKS,), **more})  # type: ignore[arg-type]


def saved(bench: Bench) -> list[int]:
    """Ends all saves. Returns how many blocks were stored in each object."""
    found = []
    while bench.pending("save"):
        found += [len(together) for together in bench.pending("save")[0][3]]
        bench.end("save", True)
        bench.end("stored", (True, {}))
    return found


def end(bench: Bench, request: object) -> None:
    bench.transfers.record_release(request, has_last_state=False)  # type: ignore[arg-type]
    bench.kv_cache.free(request.blocks)  # type: ignore[attr-defined]
    bench.transfers.end_step(1, 1, 0.0)


def test_a_chunk_is_saved_when_its_last_block_is_committed() -> None:
    bench = make()
    request = bench.compute(tokens(23))  # 5 full blocks
    ((_, blocks, slots, ((*together,),)),) = bench.pending("save")
    assert list(blocks) == request.blocks.tables[0][:4] and len(set(slots)) == 4
    assert together == [name + b"\0\0" for name in request.blocks.hashes[:4]]
    assert saved(bench) == [4]
    for num_tokens, count in ((24, 0), (31, 0), (32, 1), (33, 0)):
        num_before = request.blocks.num_committed
        assert bench.kv_cache.allocate_slots(request.blocks, num_tokens) is not None
        if bench.kv_cache.has_full_blocks(request.blocks, num_tokens):
            bench.kv_cache.commit(request.blocks, tokens(num_tokens), num_tokens)
        bench.transfers.record_committed(request, num_before)
        bench.transfers.end_step(1, 1, 0.0)
        assert saved(bench) == [4] * count, num_tokens
    end(bench, request)
    assert saved(bench) == []
    bench.check_idle()


@pytest.mark.parametrize(("num_tokens", "expected"), [(15, [1, 1, 1]), (17, [4]), (27, [4, 1, 1])])
def test_the_rest_of_a_request_is_saved_at_its_end(num_tokens: int, expected: list[int]) -> None:
    bench = make()
    end(bench, bench.compute(tokens(num_tokens)))
    assert sorted(saved(bench)) == sorted(expected)
    assert bench.counts().num_saved_blocks == num_tokens // 4
    bench.check_idle()


@pytest.mark.parametrize("limit", [3, 5, 8])
@pytest.mark.parametrize("prompt_only", [True, False])
def test_a_limit_may_end_in_a_chunk(limit: int, prompt_only: bool) -> None:
    bench = make(offload_prompt_only=prompt_only)
    if prompt_only:
        end(bench, bench.compute(tokens(64), num_prompt_tokens=4 * limit + 1))
    else:
        end(bench, bench.compute(tokens(64), max_offload_tokens=4 * limit))
    assert sorted(saved(bench)) == [1] * (limit % 4) + [4] * (limit // 4)
    bench.check_idle()


def test_two_prompts_that_part_in_a_chunk_have_a_chunk_each() -> None:
    bench = make()
    first = bench.compute(tokens(17))
    assert saved(bench) == [4]
    other = tokens(17)
    other[9:] += 100
    second = bench.compute(other)
    ((_, blocks, slots, (together,)),) = bench.pending("save")
    assert second.blocks.tables[0][:2] == first.blocks.tables[0][:2]
    assert (len(blocks), len(set(slots)), len(together)) == (4, 4, 4)
    assert saved(bench) == [4]
    end(bench, first)
    end(bench, second)
    assert saved(bench) == []
    assert len(bench.transfers.host_pool.cached_keys()) == 6  # the two that they share are there once
    bench.check_idle()


def test_of_a_chunk_that_was_evicted_in_part_the_rest_is_saved_block_by_block() -> None:
    bench = make(num_blocks=23)  # 6 blocks are the share that saves may hold
    request = bench.compute(tokens(33))
    assert [len(blocks) for _, blocks, _, _ in bench.pending("save")] == [4]
    bench.kv_cache.free(request.blocks)
    taken = bench.pool.allocate(16)  # the last block of the second chunk is evicted first
    assert bench.pool.lookup((request.blocks.hashes[7], 0)) is None
    num_left = sum(bench.pool.lookup((name, 0)) is not None for name in request.blocks.hashes[4:8])
    assert 0 < num_left < 4
    assert saved(bench) == [4] + [1] * num_left
    assert bench.counts().num_skipped_saves == 4 - num_left
    bench.pool.free(taken)
    bench.check_idle()


def test_a_chunk_waits_for_room_in_the_host_pool() -> None:
    """Slots are held until they are stored, and then the next chunk is saved, although no step runs."""
    bench = make(num_slots=20, tiers=(replace(CHUNKS, blocks_per_chunk=8),))
    end(bench, bench.compute(tokens(65)))
    bench.end("save", True)
    assert bench.calls and not bench.pending("save")  # 11 slots are free, and half of them may be used
    bench.end("stored", (True, {}))
    assert saved(bench) == [8]
    bench.check_idle()


def test_blocks_of_a_leader_that_have_no_names_yet() -> None:
    """A follower shares them, and ends before they have names."""
    bench = make()
    follower = bench.request(tokens(33))
    follower.blocks.num_committed, follower.blocks.may_be_named = 6, True
    assert follower.blocks.hashes == []
    bench.transfers.record_release(follower, has_last_state=False)
    follower.blocks.num_committed = 0
    bench.check_idle()


def test_a_fetch_reads_whole_chunks_and_names_them() -> None:
    bench = make()
    request = bench.request(tokens(4 * 11 + 1))
    assert bench.begin(request)
    asked = []
    while bench.pending("fetch"):
        keys, _, chunks = bench.pending("fetch")[0]
        asked += [(key, *chunk) for key, chunk in zip(keys, chunks, strict=True)]
        assert len(keys) % 4 == 0 or len(asked) == 11
        bench.tiers.update(keys)
        assert all(bench.end_fetch())
    wire = [name + b"\0\0" for name in request.blocks.hashes]
    whole = [(wire[i], wire[i // 4 * 4 + 3], i % 4) for i in range(8)]
    assert asked == [*whole, *((wire[i], b"", 0) for i in range(8, 11))]  # the end of the last chunk is not known
    bench.end("load", True)
    bench.check_idle()


def test_a_prompt_that_ends_with_a_chunk_finds_it() -> None:
    """Its last block is computed, because its last token is needed; the others are read."""
    bench = make()
    request = bench.request(tokens(32))
    assert bench.begin(request)
    places = []
    while bench.pending("fetch"):
        places += [place for chunk, place in bench.pending("fetch")[0][2] if chunk]
        bench.tiers.update(bench.pending("fetch")[0][0])
        assert all(bench.end_fetch())
    assert places == [0, 1, 2, 3, 0, 1, 2]
    bench.end("load", True)
    bench.check_idle()


def test_only_the_blocks_that_are_missing_are_asked_for() -> None:
    """A prompt of 775 tokens, of which the arena has 704, in chunks of 8 blocks: the last 4 of one chunk."""
    tier = replace(CHUNKS, blocks_per_chunk=8)
    bench = make(block_size=16, num_blocks=200, tiers=(tier,))
    bench.kv_cache.free(bench.compute(tokens(704)).blocks)
    saved(bench)
    bench.transfers.reset(with_host_pool=True)
    bench.compute(tokens(704))
    saved(bench)
    request = bench.request(tokens(775))
    assert bench.begin(request)
    ((_, _, chunks),) = bench.pending("fetch")
    assert [place for _, place in chunks] == [4, 5, 6, 7] and len({chunk for chunk, _ in chunks}) == 1
    bench.end_fetch()
    assert bench.brought == [request.request_id]


def test_windows_and_states_are_stored_one_by_one() -> None:
    specs = [KVCacheSpec(**SHAPE), KVCacheSpec(**SHAPE, sliding_window=40), KVCacheSpec.of_state(4, 32)]  # type: ignore[arg-type]
    bench = make(specs=specs)
    request = bench.compute(tokens(33))
    objects = [together for _, _, _, names in bench.pending("save") for together in names]
    by_group = {group: [len(each) for each in objects if each[0][-2] == group] for group in range(3)}
    assert by_group == {0: [4, 4], 1: [1] * 8, 2: [1]}
    saved(bench)
    bench.kv_cache.free(request.blocks)
    bench.check_idle()


@pytest.mark.parametrize(("num_blocks", "num_slots", "num_groups"), [(14, 100, 1), (100, 8, 1), (100, 16, 2)])
def test_a_chunk_that_never_fits_is_refused(num_blocks: int, num_slots: int, num_groups: int) -> None:
    windows = [None] * num_groups
    with pytest.raises(ConfigError, match=r"blocks_per_chunk=4 needs 16 blocks"):
        make(num_blocks, num_slots, windows=windows)
    make(max(15, num_blocks), max(num_slots, 1 + 8 * num_groups), windows=windows)


def test_a_tiny_cache_without_chunks_is_not_refused() -> None:
    Bench(num_blocks=2, num_slots=3)
