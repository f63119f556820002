"""`KVTransfers` one call at a time: which blocks are saved, and what is left after resets and new epochs."""

from __future__ import annotations

import pytest

from inflight.errors import EngineError
from inflight.kv_cache.arc_pool import ArcPool
from tests.unit.scheduler.transfer_bench import BLOCK_BYTES, TIER, Bench, clock, tokens, with_tiers

__all__ = ["clock"]


# -- out ---------------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_held_until_the_copies_have_ended() -> None:
    bench = Bench()
    request = bench.compute(tokens(17))
    ((_, blocks, slots, keys),) = bench.pending("save")
    assert list(blocks) == request.blocks.tables[0][:4] and len(slots) == 4 and keys == []
    bench.kv_cache.free(request.blocks)
    assert bench.pool.count_free(blocks) == 0
    bench.end("save", True)
    assert bench.pool.count_free(blocks) == 4
    counts = bench.counts()
    assert (counts.num_saved_blocks, counts.save_bytes) == (4, 4 * BLOCK_BYTES)
    bench.check_idle()


def test_a_save_that_failed_on_one_rank_names_no_slot() -> None:
    bench = Bench()
    bench.kv_cache.free(bench.compute(tokens(17)).blocks)
    bench.end("save", True, False)
    assert bench.transfers.host_pool.cached_keys() == []
    counts = bench.counts()
    assert (counts.num_failed, counts.num_saved_blocks) == (1, 0)
    bench.check_idle()


def test_slots_are_held_until_they_are_stored() -> None:
    bench = Bench(tiers=(TIER,))
    bench.kv_cache.free(bench.compute(tokens(17)).blocks)
    number, _, slots, keys = bench.pending("save")[0]
    assert len({key for (key,) in keys}) == 4
    bench.end("save", True)
    assert bench.pending("stored") == [(number,)]
    assert bench.transfers.host_pool.count_free(slots) == 0 and not +bench.transfers.referenced_blocks
    bench.end("stored", (True, {"fs": {"stored": 3.0}}), (False, {"fs": {"stored": 4.0}}))
    counts = bench.counts()
    assert (counts.num_skipped_saves, counts.tiers) == (4, {"fs": {"stored": 7.0}})
    bench.check_idle()


def test_a_block_is_saved_once() -> None:
    bench = Bench()
    first = bench.compute(tokens(17))
    second = bench.request(tokens(17))  # it has computed the same blocks beside the first one
    bench.kv_cache.name_blocks(second.blocks, tokens(17))
    second.blocks.num_committed = 4
    bench.transfers.record_committed(second, 0)
    bench.transfers.end_step(1, 1, 0.0)
    assert len(bench.pending("save")) == 1  # while the save runs
    bench.end("save", True)
    bench.transfers.record_committed(second, 0)
    bench.transfers.end_step(1, 1, 0.0)
    assert not bench.calls  # and afterwards
    bench.kv_cache.free(first.blocks)
    bench.check_idle()


def test_more_than_a_share_of_the_pool_is_saved_in_turns() -> None:
    bench = Bench(num_blocks=39)  # with the dummy block 40: at most 10
    bench.kv_cache.free(bench.compute(tokens(29)).blocks)
    bench.kv_cache.free(bench.compute(tokens(29, 1000)).blocks)
    assert [len(blocks) for _, blocks, _, _ in bench.pending("save")] == [7, 3]
    bench.end("save", True)
    assert [len(blocks) for _, blocks, _, _ in bench.pending("save")] == [3, 4]
    bench.end("save", True)
    bench.end("save", True)
    counts = bench.counts()
    assert (counts.num_saved_blocks, counts.num_skipped_saves) == (14, 0)
    bench.check_idle()


def test_blocks_that_are_evicted_before_there_is_room_are_not_saved() -> None:
    bench = Bench(num_blocks=39)
    bench.kv_cache.free(bench.compute(tokens(41)).blocks)
    bench.kv_cache.free(bench.compute(tokens(29, 1000)).blocks)
    bench.pool.free(bench.pool.allocate(bench.pool.num_free_blocks))
    bench.end("save", True)
    counts = bench.counts()
    assert (counts.num_saved_blocks, counts.num_skipped_saves) == (10, 7)
    bench.check_idle()


def test_no_more_blocks_wait_to_be_saved_than_there_are() -> None:
    bench = Bench(num_blocks=39)
    for first in range(0, 10_000, 1000):
        bench.kv_cache.free(bench.compute(tokens(29, first)).blocks)
        assert len(bench.transfers._unsaved) <= bench.pool.num_blocks
    assert bench.counts().num_skipped_saves == 70 - 10 - len(bench.transfers._unsaved)
    while bench.pending("save"):
        bench.end("save", True)
    bench.check_idle()


def test_only_blocks_of_prompts_are_saved_if_asked() -> None:
    for prompt_only in (False, True):
        bench = Bench(offload_prompt_only=prompt_only)
        bench.kv_cache.free(bench.compute(tokens(21), num_prompt_tokens=10).blocks)
        assert [len(blocks) for _, blocks, _, _ in bench.pending("save")] == [2 if prompt_only else 5]
        bench.end("save", True)
        bench.check_idle()


@pytest.mark.parametrize(("most", "num_blocks"), [(0, 0), (3, 0), (4, 1), (9, 2), (100, 5)])
def test_a_request_may_limit_what_is_saved_for_it(most: int, num_blocks: int) -> None:
    bench = Bench()
    for _ in range(2):
        bench.kv_cache.free(bench.compute(tokens(21), max_offload_tokens=most).blocks)
        assert [len(blocks) for _, blocks, _, _ in bench.pending("save")] == [num_blocks] * (num_blocks > 0)
        if num_blocks:
            bench.end("save", True)
        bench.forget_arena()
        bench.transfers.reset(with_host_pool=True)
    bench.check_idle()


@pytest.mark.parametrize("is_limited", [True, False])
def test_blocks_that_a_request_finds_in_the_arena_are_saved_for_it(is_limited: bool) -> None:
    """Another request has computed them, for which they were not saved. Otherwise the host pool would have later blocks
    only."""
    bench = Bench(offload_prompt_only=not is_limited)
    limits = {"max_offload_tokens": 4} if is_limited else {}
    bench.kv_cache.free(bench.compute(tokens(21), None if is_limited else 6, **limits).blocks)
    bench.end("save", True)
    for num_new in (4 + 4, 0):  # the second time the host pool has all
        bench.kv_cache.free(bench.compute(tokens(37)).blocks)
        assert [len(blocks) for _, blocks, _, _ in bench.pending("save")] == [num_new] * (num_new > 0)
        if num_new:
            bench.end("save", True)
    bench.forget_arena()
    assert bench.begin(bench.request(tokens(37)))
    assert [len(blocks) for _, blocks in bench.pending("load")] == [9]
    bench.end("load", True)
    assert bench.counts().num_skipped_saves == 0
    bench.check_idle()


def test_a_request_that_comes_back_after_a_preemption_is_no_new_use() -> None:
    bench = Bench(uses_arc=True)
    bench.save(tokens(9))
    for num_cached_tokens, num_again in ((0, 0), (-1, 2)):
        bench.forget_arena()
        request = bench.request(tokens(9))
        request.num_cached_tokens = num_cached_tokens
        assert bench.begin(request)
        bench.end("load", True)
        host_pool = bench.transfers.host_pool
        assert isinstance(host_pool, ArcPool)
        assert [len(each) for each in host_pool._arc.lists] == [2 - num_again, num_again]
    bench.check_idle()


@pytest.mark.parametrize(("most", "num_blocks"), [(0, 0), (3, 0), (4, 1), (15, 3), (100, 5)])
@pytest.mark.parametrize("in_tiers", [True, False])
def test_a_request_may_limit_what_is_loaded_for_it(most: int, num_blocks: int, in_tiers: bool) -> None:
    bench = Bench(tiers=(TIER,))
    if in_tiers:
        with_tiers(bench, tokens(21))
    else:
        bench.save(tokens(21))
        bench.forget_arena()
    request = bench.request(tokens(21), max_load_tokens=most)
    assert bench.begin(request) == (num_blocks > 0)
    num_fetched = 0
    while bench.pending("fetch"):
        num_fetched += len(bench.pending("fetch")[0][0])
        bench.end_fetch()
    assert num_fetched == (num_blocks if in_tiers else 0)
    assert [len(blocks) for _, blocks in bench.pending("load")] == [num_blocks] * (num_blocks > 0)
    if num_blocks:
        bench.end("load", True)
    assert len(bench.kv_cache.get_computed_blocks(request.blocks, tokens(21))[0]) == num_blocks
    other = bench.request(tokens(21))  # it is not limited
    assert bench.begin(other) == (num_blocks < 5)
    while bench.pending("fetch"):
        bench.end_fetch()
    if num_blocks < 5:
        bench.end("load", True)
    assert len(bench.kv_cache.get_computed_blocks(other.blocks, tokens(21))[0]) == 5
    assert not bench.begin(bench.request(tokens(21), max_load_tokens=4))  # all is in the arena, which has no limit
    bench.check_idle()


def test_a_producer_loads_nothing() -> None:
    bench = Bench(loads=False, tiers=(TIER,))
    with_tiers(bench, tokens(17))
    bench.save(tokens(17))
    bench.forget_arena()
    assert not bench.begin(bench.request(tokens(17)))
    bench.check_idle()


def test_a_consumer_saves_nothing() -> None:
    producer, consumer = Bench(tiers=(TIER,)), Bench(saves=False, tiers=(TIER,))
    with_tiers(producer, tokens(17))
    consumer.tiers = producer.tiers
    consumer.kv_cache.free(consumer.compute(tokens(17)).blocks)
    assert not consumer.calls
    consumer.forget_arena()
    assert consumer.begin(consumer.request(tokens(17)))
    while consumer.pending("fetch"):
        assert all(consumer.end_fetch())
    consumer.end("load", True)
    assert consumer.counts().num_loaded_blocks == 4
    consumer.check_idle()


# -- resets and epochs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_host_pool", [False, True])
def test_a_reset_while_blocks_are_saved(with_host_pool: bool) -> None:
    """They have been computed before it, and nobody may find them after it."""
    bench = Bench()
    bench.kv_cache.free(bench.compute(tokens(17)).blocks)
    bench.forget_arena()
    bench.transfers.reset(with_host_pool=with_host_pool)
    bench.end("save", True)
    assert bench.transfers.host_pool.cached_keys() == []
    assert not bench.begin(bench.request(tokens(17)))
    bench.check_idle()


def test_a_reset_before_committed_blocks_are_saved() -> None:
    bench = Bench()
    request = bench.request(tokens(17))
    assert bench.kv_cache.allocate_slots(request.blocks, 17) is not None
    bench.kv_cache.commit(request.blocks, tokens(17), 17)
    bench.transfers.record_committed(request, 0)
    bench.transfers.reset(with_host_pool=False)
    bench.transfers.end_step(1, 1, 0.0)
    assert not bench.calls


@pytest.mark.parametrize("with_host_pool", [False, True])
def test_a_reset_while_blocks_are_loaded(with_host_pool: bool) -> None:
    bench = Bench()
    bench.save(tokens(17))
    bench.forget_arena()
    request = bench.request(tokens(17))
    assert bench.begin(request)
    bench.forget_arena()
    bench.transfers.reset(with_host_pool=with_host_pool)
    bench.end("load", True)
    assert bench.brought == [request.request_id]
    assert bench.kv_cache.get_computed_blocks(request.blocks, tokens(17)) == ([],)
    assert bench.begin(bench.request(tokens(17))) == (not with_host_pool)
    if not with_host_pool:
        bench.end("load", True)
    bench.check_idle()


def test_a_reset_while_blocks_are_fetched() -> None:
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(9))
    request = bench.request(tokens(9))
    assert bench.begin(request)
    bench.transfers.reset(with_host_pool=True)
    bench.end_fetch()
    assert bench.brought == [request.request_id]
    assert bench.transfers.host_pool.cached_keys() == []
    bench.check_idle()


def test_what_is_in_the_tiers_is_not_used_after_it_was_forgotten() -> None:
    bench = Bench(tiers=(TIER,))
    keys = with_tiers(bench, tokens(9))
    bench.transfers.forget_tiers()
    request = bench.request(tokens(9))
    assert bench.begin(request)
    assert not {*bench.pending("fetch")[0][0]} & {*keys}
    assert bench.end_fetch() == [False, False]
    assert bench.brought == [request.request_id]
    bench.check_idle()


@pytest.mark.parametrize("action", ["save", "stored", "fetch", "load"])
def test_a_new_epoch_ends_what_is_under_way(action: str) -> None:
    bench = Bench(tiers=(TIER,))
    request = None
    if action in ("save", "stored"):
        bench.kv_cache.free(bench.compute(tokens(9)).blocks)
        if action == "stored":
            bench.end("save", True)
    else:
        with_tiers(bench, tokens(9))
        request = bench.request(tokens(9))
        assert bench.begin(request)
        if action == "load":
            bench.end_fetch()
    num_news = bench.num_news
    bench.take(action).future.set_exception(EngineError("a rank was lost"))
    assert bench.num_news == num_news + 1  # so that somebody settles
    bench.transfers.settle()
    assert bench.brought == ([] if request is None else [request.request_id])
    bench.check_idle()


def test_the_host_pool_evicts_by_the_configured_policy() -> None:
    for uses_arc in (False, True):
        assert isinstance(Bench(uses_arc=uses_arc).transfers.host_pool, ArcPool) is uses_arc
