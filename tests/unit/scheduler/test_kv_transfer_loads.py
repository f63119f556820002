"""`KVTransfers` one call at a time: which blocks it asks the ranks to load and to fetch, and who waits for that."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.errors import EngineError, ErrorKind
from inflight.interface.kv_cache import KVCacheSpec
from inflight.scheduler import kv_transfers
from tests.unit.scheduler.transfer_bench import BLOCK_BYTES, TIER, Bench, Clock, clock, tokens, with_tiers

__all__ = ["clock"]


# -- from the host pool -----------------------------------------------------------------------------------------------------


def test_only_the_blocks_that_the_arena_lacks_are_loaded() -> None:
    """A prompt of 775 tokens, of which the arena has 704: 4 blocks of 16 are copied, because the last 7 tokens fill none."""
    bench = Bench(block_size=16, num_blocks=200, num_slots=100)
    prompt = tokens(775)
    bench.save(prompt)
    bench.forget_arena()
    bench.kv_cache.free(bench.compute(prompt[:704]).blocks)
    assert not bench.calls  # the host pool has these blocks
    bench.counts()
    request = bench.request(prompt)
    assert bench.begin(request) and bench.transfers.awaits(request)
    ((slots, blocks),) = bench.pending("load")
    assert len(slots) == len(blocks) == 4
    assert sum(bench.transfers.referenced_blocks.values()) == 48
    bench.end("load", True)
    assert bench.brought == [request.request_id]
    counts = bench.counts()
    assert (counts.num_loaded_blocks, counts.load_bytes) == (4, 4 * BLOCK_BYTES)
    assert (counts.num_queried_tokens, counts.num_hit_tokens) == (64, 64)
    assert len(bench.kv_cache.get_computed_blocks(request.blocks, prompt)[0]) == 48
    bench.check_idle()


def test_blocks_that_the_arena_has_are_not_loaded() -> None:
    bench = Bench()
    bench.save(tokens(17))
    assert not bench.begin(bench.request(tokens(17)))
    assert not bench.begin(bench.request(tokens(3)))  # no full block
    bench.check_idle()


def test_a_load_that_failed_on_one_rank_names_nothing() -> None:
    bench = Bench()
    bench.save(tokens(17))
    bench.forget_arena()
    request = bench.request(tokens(17))
    assert bench.begin(request)
    bench.end("load", True, False)
    assert bench.brought == [request.request_id] and bench.failed == []
    assert bench.kv_cache.get_computed_blocks(request.blocks, tokens(17)) == ([],)
    assert bench.counts().num_failed == 1
    bench.check_idle()


def test_a_request_that_may_not_be_computed_fails_once() -> None:
    bench = Bench(fails_if_not_loaded=True)
    bench.save(tokens(17))
    bench.forget_arena()
    request = bench.request(tokens(17))
    assert bench.begin(request)
    bench.end("load", False)
    reason = "its saved KV blocks could not be loaded (kv_load_failure_policy='fail'); send it again"
    assert bench.failed == [(request.request_id, reason, ErrorKind.ENGINE)]
    bench.check_idle()


@pytest.mark.parametrize("cause", ["reset", "late", "aborted", "new epoch"])
def test_a_request_does_not_fail_because_of_something_else(cause: str, clock: Clock) -> None:
    """With a reset the blocks are gone, and a request that computes already needs none."""
    bench = Bench(fails_if_not_loaded=True)
    bench.save(tokens(17))
    bench.forget_arena()
    request = bench.request(tokens(17))
    assert bench.begin(request)
    if cause == "reset":
        bench.transfers.reset(with_host_pool=False)
    elif cause == "late":
        clock.now += 1e6
        bench.transfers.settle()
    elif cause == "aborted":
        bench.transfers.forget(request)
    if cause == "new epoch":
        bench.take("load").future.set_exception(EngineError("a rank was lost"))
        bench.transfers.settle()
    else:
        bench.end("load", cause == "reset")
    assert bench.failed == []
    assert bench.brought == ([] if cause == "aborted" else [request.request_id])
    bench.check_idle()


def test_a_load_without_room_waits_for_another_load() -> None:
    bench = Bench(num_blocks=40)  # transfers in one direction hold at most 10
    first, second = tokens(33), tokens(33, 1000)
    bench.save(first)
    bench.save(second)
    bench.forget_arena()
    assert bench.begin(bench.request(first)) and bench.begin(bench.request(second))
    assert [len(blocks) for _, blocks in bench.pending("load")] == [8]
    assert bench.brought == []
    bench.end("load", True)
    assert bench.brought == ["r3"]
    assert [len(blocks) for _, blocks in bench.pending("load")] == [8]
    bench.end("load", True)
    assert bench.brought == ["r3", "r4"]
    bench.check_idle()


@pytest.mark.parametrize("how", ["failed", "lost"])
def test_a_load_without_room_goes_on_when_the_other_ended_badly(how: str) -> None:
    bench = Bench(num_blocks=40)
    first, second = tokens(33), tokens(33, 1000)
    bench.save(first)
    bench.save(second)
    bench.forget_arena()
    assert bench.begin(bench.request(first)) and bench.begin(bench.request(second))
    if how == "failed":
        bench.end("load", False)
    else:
        bench.take("load").future.set_exception(EngineError("a rank was lost"))
        bench.transfers.settle()
    bench.end("load", True)
    assert bench.brought == ["r3", "r4"]
    bench.check_idle()


def test_a_request_that_has_waited_too_long_for_room_is_computed(clock: Clock) -> None:
    bench = Bench(num_blocks=40)
    bench.save(tokens(33))
    bench.save(tokens(33, 1000))
    bench.forget_arena()
    bench.begin(bench.request(tokens(33)))
    bench.begin(bench.request(tokens(33, 1000)))
    clock.now += kv_transfers.UNKNOWN_WAIT_SECONDS
    bench.transfers.settle()
    assert bench.brought == ["r3", "r4"]
    bench.end("load", True)
    bench.check_idle()  # the second did not begin


def test_a_request_for_which_running_ones_leave_no_room_asks_again() -> None:
    bench = Bench(num_blocks=12)
    bench.save(tokens(9))  # the share of 12 is 3 blocks
    bench.forget_arena()
    running = bench.pool.allocate(11)
    request = bench.request(tokens(9))
    assert not bench.begin(request)
    assert not request.blocks.were_sought and not bench.calls
    bench.pool.free(running)
    assert bench.begin(request)
    assert request.blocks.were_sought
    bench.end("load", True)
    bench.check_idle()


def test_blocks_that_are_loaded_are_not_evicted_meanwhile() -> None:
    """Those that the arena has are held, too, and so are the slots."""
    bench = Bench(num_blocks=12, num_slots=8)
    bench.save(tokens(9))
    bench.save(tokens(9, 1000))
    bench.forget_arena()
    bench.kv_cache.free(bench.compute(tokens(5)).blocks)  # the first of two
    assert bench.begin(bench.request(tokens(9)))
    ((slots, blocks),) = bench.pending("load")
    rest = bench.pool.allocate(bench.pool.num_free_blocks)
    assert not {*rest} & {*blocks, *bench.transfers.referenced_blocks.elements()} and len(rest) == 10
    assert bench.transfers.host_pool.count_free(slots) == 0
    bench.pool.free(rest)
    bench.end("load", True)
    bench.check_idle()


# -- from the tiers ----------------------------------------------------------------------------------------------------


def test_a_prompt_is_fetched_in_growing_pieces_and_then_loaded() -> None:
    bench = Bench(num_blocks=100, num_slots=100, tiers=(TIER,))
    with_tiers(bench, tokens(41))
    request = bench.request(tokens(41))
    assert bench.begin(request)
    lengths = []
    while bench.pending("fetch"):
        lengths.append(len(bench.pending("fetch")[0][0]))
        assert all(bench.end_fetch())
    assert lengths == [2, 4, 4]
    assert bench.brought == []
    bench.end("load", True)
    assert bench.brought == [request.request_id]
    counts = bench.counts()
    assert (counts.num_fetched_blocks, counts.num_loaded_blocks, counts.tiers) == (10, 10, {"fs": {"hits": 10.0}})
    assert len(bench.kv_cache.get_computed_blocks(request.blocks, tokens(41))[0]) == 10
    bench.check_idle()


def test_the_first_missing_block_ends_a_fetch() -> None:
    bench = Bench(num_blocks=100, num_slots=100, tiers=(TIER,))
    keys = with_tiers(bench, tokens(41))
    bench.tiers.remove(keys[3])
    request = bench.request(tokens(41))
    assert bench.begin(request)
    assert bench.end_fetch() == [True, True]
    assert bench.end_fetch() == [True, False, False, False]
    ((slots, _),) = bench.pending("load")
    assert len(slots) == 3
    bench.end("load", True)
    assert bench.brought == [request.request_id]
    bench.check_idle()


def test_what_one_rank_lacks_is_missing() -> None:
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(9))
    request = bench.request(tokens(9))
    assert bench.begin(request)
    bench.end("fetch", ([True, True], {}), ([True, False], {}))
    ((slots, _),) = bench.pending("load")
    assert len(slots) == 1
    bench.end("load", True, True)
    bench.check_idle()


def test_blocks_that_come_late_are_there_for_the_next_request(clock: Clock) -> None:
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(9))
    late = bench.request(tokens(9))
    assert bench.begin(late)
    clock.now += kv_transfers.UNKNOWN_WAIT_SECONDS - 0.01
    bench.transfers.settle()
    assert bench.transfers.awaits(late)
    clock.now += 0.02
    bench.transfers.settle()
    assert not bench.transfers.awaits(late) and bench.brought == [late.request_id]
    assert bench.counts().num_late == 1
    bench.end_fetch()
    assert bench.brought == [late.request_id]
    bench.check_idle()  # nobody waits, so nothing was loaded
    following = bench.request(tokens(9))
    assert bench.begin(following)
    bench.end("load", True)
    assert bench.brought == [late.request_id, following.request_id]
    assert bench.counts().num_late == 0
    bench.check_idle()


def test_an_older_transfer_does_not_end_the_wait_of_a_newer_one(clock: Clock) -> None:
    """The request was released late, computed, was preempted, and now waits again."""
    bench = Bench(tiers=(TIER,))
    keys = with_tiers(bench, tokens(9))
    request = bench.request(tokens(9))
    assert bench.begin(request)
    clock.now += kv_transfers.UNKNOWN_WAIT_SECONDS
    bench.transfers.settle()
    assert bench.begin(request)
    bench.tiers.clear()
    bench.end_fetch()  # the old one
    assert bench.transfers.awaits(request) and bench.brought == [request.request_id]
    bench.tiers.update(keys)
    bench.end_fetch()
    bench.end("load", True)
    assert bench.brought == [request.request_id] * 2
    bench.check_idle()


def test_what_two_requests_share_is_loaded_once() -> None:
    bench = Bench()
    bench.save(tokens(17))
    bench.forget_arena()
    assert bench.begin(bench.request(tokens(17))) and bench.begin(bench.request(tokens(13)))
    assert [len(blocks) for _, blocks in bench.pending("load")] == [4]
    assert bench.transfers.is_busy and bench.brought == []
    bench.end("load", True)
    assert bench.brought == ["r2", "r3"]
    assert bench.counts().num_loaded_blocks == 4
    bench.check_idle()


def test_what_two_requests_share_is_fetched_once() -> None:
    bench = Bench(num_blocks=100, num_slots=100, tiers=(TIER,))
    first, second = tokens(25), np.append(tokens(16), tokens(9, 1000))
    with_tiers(bench, first)
    with_tiers(bench, second)
    assert bench.begin(bench.request(first)) and bench.begin(bench.request(second))
    fetched = list[bytes]()
    while bench.pending("fetch") or bench.pending("load"):
        if bench.pending("fetch"):
            fetched += bench.pending("fetch")[0][0]
            assert all(bench.end_fetch())
        else:
            bench.end("load", True)
    assert len(fetched) == len(set(fetched)) == 8
    assert sorted(bench.brought) == ["r3", "r4"]
    assert bench.counts().num_loaded_blocks == 8
    bench.check_idle()


@pytest.mark.parametrize("end", ["missing", "lost"])
def test_a_shared_fetch_that_brings_nothing_is_tried_by_the_other_request(end: str) -> None:
    bench = Bench(tiers=(TIER,))
    keys = with_tiers(bench, tokens(9))
    assert bench.begin(bench.request(tokens(9))) and bench.begin(bench.request(tokens(9)))
    assert len(bench.pending("fetch")) == 1
    if end == "missing":
        bench.tiers.clear()
        assert bench.end_fetch() == [False, False]
        bench.tiers.update(keys)
    else:
        bench.take("fetch").future.set_exception(EngineError("a rank was lost"))
        bench.transfers.settle()
    assert bench.brought == ["r2"]
    assert bench.end_fetch() == [True, True]
    bench.end("load", True)
    assert bench.brought == ["r2", "r3"]
    bench.check_idle()


@pytest.mark.parametrize("action", ["fetch", "load"])
def test_an_aborted_request_is_not_brought(action: str) -> None:
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(9))
    request = bench.request(tokens(9))
    assert bench.begin(request)
    if action == "load":
        bench.end_fetch()
    bench.transfers.forget(request)
    assert not bench.transfers.awaits(request) and not bench.transfers.is_busy
    if action == "fetch":
        bench.end_fetch()
    else:
        bench.end("load", True)
    assert bench.brought == []
    bench.check_idle()


# -- several groups ----------------------------------------------------------------------------------------------------


def test_of_a_window_only_its_last_blocks_are_loaded() -> None:
    """24 tokens are cached. The next one sees 5 tokens in the second group: those from 20 on, in one block."""
    bench = Bench(windows=(None, 5))
    bench.save(tokens(25))
    bench.forget_arena()
    request = bench.request(tokens(25))
    assert bench.begin(request)
    ((_, blocks),) = bench.pending("load")
    assert len(blocks) == 6 + 1
    bench.end("load", True)
    assert [len(table) for table in bench.kv_cache.get_computed_blocks(request.blocks, tokens(25))] == [6, 6]
    bench.check_idle()


def load_all(bench: Bench) -> int:
    """End all calls. Returns how many blocks were loaded."""
    num_loaded = 0
    while bench.pending("fetch") or bench.pending("load"):
        if bench.pending("fetch"):
            bench.end_fetch()
        else:
            num_loaded += len(bench.pending("load")[0][1])
            bench.end("load", True)
    return num_loaded


SHAPE = {"block_size": 4, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32", "itemsize": 4}
WINDOWED = [KVCacheSpec(**SHAPE), KVCacheSpec(**SHAPE, sliding_window=9), KVCacheSpec(**SHAPE, sliding_window=9)]
ONLY_WINDOWS = [KVCacheSpec(**SHAPE, sliding_window=9)]
RECURRENT = [KVCacheSpec(**SHAPE), KVCacheSpec.of_state(4, 32)]


def make_and_save(specs: list[KVCacheSpec], num_blocks: int) -> tuple[Bench, list[list[bytes]]]:
    """The tiers have a prompt of so many blocks. Also returns their keys by number of the block."""
    bench = Bench(specs=specs, num_blocks=2000, num_slots=2000, tiers=(TIER,))
    prompt = tokens(4 * num_blocks + 1)
    keys = with_tiers(bench, prompt)
    request = bench.request(prompt)
    bench.kv_cache.name_blocks(request.blocks, prompt)
    return bench, [[key for key in keys if key.startswith(name)] for name in request.blocks.hashes]


@pytest.mark.parametrize("in_host_pool", [False, True])
@pytest.mark.parametrize(
    ("specs", "lost", "group", "hit"),
    [
        # a window takes 2 blocks, so the last 2 before each multiple of 16 are kept
        (WINDOWED, 40, 0, 32),
        (WINDOWED, 32, 0, 32),
        (WINDOWED, 31, 0, 16),
        (WINDOWED, 9, 0, 0),
        (WINDOWED, 48, 0, 48),
        (WINDOWED, 50, 1, 48),
        (WINDOWED, 49, 2, 48),
        (WINDOWED, 47, 2, 51),
        (ONLY_WINDOWS, 50, 0, 48),
        # there is a state after 128 blocks
        (RECURRENT, 150, 0, 128),
        (RECURRENT, 128, 0, 128),
        (RECURRENT, 127, 0, 0),
        (RECURRENT, 160, 1, 128),
    ],
)
def test_what_a_lost_block_costs(specs: list[KVCacheSpec], lost: int, group: int, hit: int, in_host_pool: bool) -> None:
    """Of a prompt of 51 or 161 blocks. Before, windows lost the whole prompt."""
    bench, keys = make_and_save(specs, 161 if specs is RECURRENT else 51)
    (key,) = [key for key in keys[lost] if key[-2] == group]
    prompt = tokens(4 * len(keys) + 1)
    if in_host_pool:
        bench.begin(bench.request(prompt))
        load_all(bench)
        bench.forget_arena()
        slot = bench.transfers.host_pool.lookup((key[:-2], group))
        if slot is not None:  # it is there only if the request needed it
            bench.transfers.host_pool._forget(slot)
            bench.transfers.host_pool._cached.pop(slot)
            bench.transfers.host_pool._empty.append(slot)
    bench.tiers -= {key}
    request = bench.request(prompt)
    bench.begin(request)
    load_all(bench)
    assert [len(table) for table in bench.kv_cache.get_computed_blocks(request.blocks, prompt)] == [hit] * len(specs)
    bench.check_idle()


@pytest.mark.parametrize("in_tiers", [True, False])
@pytest.mark.parametrize(
    ("specs", "most", "hit"),
    [
        *[(WINDOWED, 204, 51), (WINDOWED, 203, 48), (WINDOWED, 160, 32), (WINDOWED, 128, 32), (WINDOWED, 63, 0)],
        *[(ONLY_WINDOWS, 160, 32), (RECURRENT, 600, 128), (RECURRENT, 511, 0)],
    ],
)
def test_a_limit_of_loaded_tokens_holds(specs: list[KVCacheSpec], most: int, hit: int, in_tiers: bool) -> None:
    """And within it, what windows and states need is loaded. Before, only without a limit."""
    bench, keys = make_and_save(specs, 161 if specs is RECURRENT else 51)
    prompt = tokens(4 * len(keys) + 1)
    if not in_tiers:
        bench.save(prompt)
        bench.forget_arena()
    request = bench.request(prompt, max_load_tokens=most)
    bench.begin(request)
    load_all(bench)
    assert [len(table) for table in bench.kv_cache.get_computed_blocks(request.blocks, prompt)] == [hit] * len(specs)
    bench.check_idle()


def test_the_end_of_an_earlier_prompt_is_found_within_a_limit() -> None:
    """A tier has the first 21 blocks of a prompt of 51, and the windows before its end."""
    bench, _ = make_and_save(WINDOWED, 21)
    request = bench.request(tokens(205), max_load_tokens=4 * 21)
    bench.begin(request)
    assert load_all(bench) == 21 + 2 * 2
    bench.check_idle()


def test_of_windows_only_what_is_needed_is_fetched() -> None:
    bench, keys = make_and_save(WINDOWED, 51)
    assert sum(map(len, keys)) == 51 + 2 * 2 * 4, "before each multiple of 16, and before the end"
    bench.begin(bench.request(tokens(205)))
    fetched = set[bytes]()
    while bench.pending("fetch"):
        fetched.update(bench.pending("fetch")[0][0])
        bench.end_fetch()
    assert len(fetched) == 51 + 2 * 2
    assert load_all(bench) == 51 + 2 * 2
    bench.check_idle()


def test_the_window_at_the_end_of_an_answer_is_fetched() -> None:
    """A tier has 6 blocks of a session. The new prompt has 9 full blocks."""
    bench = Bench(windows=(None, 5), num_blocks=100, num_slots=100, tiers=(TIER,))
    session = bench.compute(tokens(24), num_prompt_tokens=5)
    assert bench.kv_cache.name_last_state(session.blocks)
    bench.transfers.record_release(session, has_last_state=True)
    while bench.pending("save"):
        bench.tiers.update(key for together in bench.pending("save")[0][3] for key in together)
        bench.end("save", True)
        bench.end("stored", (True, {}))
        bench.transfers.end_step(1, 1, 0.0)
    bench.kv_cache.free(session.blocks)
    assert len(bench.tiers) == 6 + 2, "of the window, the block at the end of the prompt, and the last one"
    bench.forget_arena()
    bench.transfers.reset(with_host_pool=True)
    assert bench.begin(bench.request(tokens(37)))
    while bench.pending("fetch"):
        bench.end_fetch()
    assert [len(blocks) for _, blocks in bench.pending("load")] == [6 + 1]
    bench.end("load", True)
    bench.check_idle()


@pytest.mark.parametrize("has_state", [True, False])
def test_the_state_at_the_end_of_an_answer_is_fetched(has_state: bool) -> None:
    """A tier has 6 blocks of a session, and the state after them. The new prompt has 9 full blocks."""
    shape = {"block_size": 4, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32", "itemsize": 4}
    bench = Bench(
        specs=[KVCacheSpec(**shape), KVCacheSpec.of_state(4, 32)], tiers=(TIER,), num_blocks=100, num_slots=100
    )
    session = bench.compute(tokens(24), num_prompt_tokens=5)
    assert bench.kv_cache.name_last_state(session.blocks)
    bench.transfers.record_release(session, has_last_state=True)
    bench.transfers.end_step(1, 1, 0.0)
    bench.kv_cache.free(session.blocks)
    while bench.pending("save"):
        bench.tiers.update(key for together in bench.pending("save")[0][3] for key in together)
        bench.end("save", True)
        bench.end("stored", (True, {}))
    (state,) = [key for key in bench.tiers if key[-2:] == b"\1\0" and key.startswith(session.blocks.hashes[5])]
    bench.tiers -= set() if has_state else {state}
    bench.forget_arena()
    bench.transfers.reset(with_host_pool=True)
    request = bench.request(tokens(37))
    assert bench.begin(request)
    while bench.pending("fetch"):
        bench.end_fetch()
    assert [len(blocks) for _, blocks in bench.pending("load")] == ([6 + 1] if has_state else [])
    if has_state:
        bench.end("load", True)
    assert not bench.transfers.awaits(request)
    bench.check_idle()


def test_of_a_recurrent_group_the_last_snapshot_is_loaded() -> None:
    """32 tokens have 8 blocks, and one snapshot: the state after the last full block of the prompt."""
    shape = {"block_size": 4, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32", "itemsize": 4}
    state = KVCacheSpec.of_state(4, 32)
    bench = Bench(specs=[KVCacheSpec(**shape), state])
    bench.save(tokens(33))
    bench.forget_arena()
    request = bench.request(tokens(33))
    assert bench.begin(request)
    ((_, blocks),) = bench.pending("load")
    assert len(blocks) == 8 + 1
    bench.end("load", True)
    assert bench.counts().num_hit_tokens == 32
    bench.check_idle()
