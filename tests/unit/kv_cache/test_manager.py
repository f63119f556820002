"""`KVCacheManager`: what a request's tables hold, what others find of it, and what is given back first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.request import Int32Array
from inflight.kv_cache.kept_blocks import KeptBlocks
from inflight.kv_cache.manager import NO_BLOCKS, KVCacheManager
from inflight.kv_cache.request_blocks import RequestBlocks

SIZE = 4


def make(num_blocks: int, *windows: int | None, caching: bool = True) -> KVCacheManager:
    """`num_blocks` that can be given out; a group for each window."""
    groups = tuple(
        KVCacheGroup(
            layer_names=(f"layers.{i}",),
            spec=KVCacheSpec(
                block_size=SIZE, num_kv_heads=1, head_dim=1, dtype="float32", itemsize=4, sliding_window=window
            ),
        )
        for i, window in enumerate(windows or (None,))
    )
    config = KVCacheConfig(num_blocks=num_blocks + 1, block_bytes=64, groups=groups)
    return KVCacheManager(config, fingerprint="m", enable_prefix_caching=caching)


def tokens(count: int, first: int = 0) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


def compute(manager: KVCacheManager, token_ids: Int32Array) -> RequestBlocks:
    """A request that is admitted and computed in one step."""
    blocks = manager.new_request("")
    assert manager.allocate_slots(blocks, len(token_ids), manager.get_computed_blocks(blocks, token_ids)) is not None
    manager.commit(blocks, token_ids, len(token_ids))
    return blocks


def num_hits(manager: KVCacheManager, token_ids: Int32Array) -> int:
    """Tokens that a new request need not compute."""
    return SIZE * len(manager.get_computed_blocks(manager.new_request(""), token_ids)[0])


def test_a_request_may_take_the_last_block() -> None:
    manager = make(3)
    blocks = manager.new_request("")
    assert manager.allocate_slots(blocks, 3 * SIZE) == 3
    assert (manager.pool.num_free_blocks, manager.usage) == (0, 1.0)
    assert manager.allocate_slots(blocks, 3 * SIZE + 1) is None
    assert len(blocks.tables[0]) == 3


def test_hits_that_were_free_count_as_taken() -> None:
    """Two cached blocks are free, and one other: a request that shares both may have one more, not two."""
    manager = make(3)
    manager.free(compute(manager, tokens(2 * SIZE + 1)))
    wanted = tokens(4 * SIZE)
    blocks = manager.new_request("")
    computed = manager.get_computed_blocks(blocks, wanted)
    assert len(computed[0]) == 2
    assert manager.allocate_slots(blocks, 4 * SIZE, computed) is None
    assert blocks.tables == ([],) and manager.pool.num_free_blocks == 3
    assert manager.allocate_slots(blocks, 3 * SIZE, computed) == 3
    assert blocks.tables[0][:2] == computed[0]
    manager.check_integrity([blocks])


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    """The beginning is what others share, and without it the blocks behind it are of no use."""
    manager = make(10)
    manager.free(compute(manager, tokens(10 * SIZE)))
    evicting = manager.new_request("")
    assert manager.allocate_slots(evicting, 3 * SIZE) == 3
    assert num_hits(manager, tokens(10 * SIZE + 1)) == 7 * SIZE


def test_the_last_token_is_computed() -> None:
    manager = make(4)
    manager.free(compute(manager, tokens(2 * SIZE)))
    assert num_hits(manager, tokens(2 * SIZE)) == SIZE
    assert num_hits(manager, tokens(2 * SIZE + 1)) == 2 * SIZE


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make(4, caching=False)
    compute(manager, tokens(2 * SIZE))
    assert manager.get_computed_blocks(manager.new_request(""), tokens(3 * SIZE)) == NO_BLOCKS


@pytest.mark.parametrize("window", [1, 2, SIZE, SIZE + 1, SIZE + 2, 2 * SIZE, 2 * SIZE + 1])
def test_a_window_needs_the_blocks_that_its_next_token_sees(window: int) -> None:
    """The token behind the hit sees itself and `window - 1` before it: blocks further left may be gone."""
    for num_kept in range(4):
        manager = make(8, window)
        prompt = tokens(4 * SIZE)
        keys = compute(manager, np.append(prompt, np.int32(0))).hashes
        manager = make(8, window)  # its blocks as another might have left them: only the last `num_kept` are cached
        pool = manager.pool
        for key in keys[4 - num_kept :]:
            (block_id,) = pool.allocate(1)
            pool.register(block_id, (key, 0))
            pool.free([block_id])
        is_enough = num_kept * SIZE >= window - 1
        assert (num_hits(manager, np.append(prompt, np.int32(0))) == 4 * SIZE) == is_enough, num_kept


def test_a_window_gives_back_what_no_later_token_sees() -> None:
    manager = make(8, SIZE + 1)
    blocks = manager.new_request("")
    manager.allocate_slots(blocks, 4 * SIZE)
    manager.commit(blocks, tokens(4 * SIZE), 3 * SIZE)
    # the token at 3 * SIZE sees [2 * SIZE, 3 * SIZE]
    assert [block_id == DUMMY_BLOCK for block_id in blocks.tables[0]] == [True, True, False, False]
    assert manager.pool.num_free_blocks == 8 - 2
    manager.check_integrity([blocks])


def test_all_groups_must_have_what_is_found() -> None:
    """A full group and a windowed one: the hit ends where one of them ends."""
    manager = make(16, None, SIZE)
    first = compute(manager, tokens(4 * SIZE))
    assert num_hits(manager, tokens(4 * SIZE + 1)) == 4 * SIZE
    manager.pool._forget(first.tables[0][2])  # of the full group
    assert num_hits(manager, tokens(4 * SIZE + 1)) == 2 * SIZE


def test_a_child_shares_full_blocks_unless_a_window_has_left_them() -> None:
    manager = make(8, SIZE + 1)
    leader = manager.new_request("")
    manager.allocate_slots(leader, 4 * SIZE)
    child = manager.new_request("")
    # the token at 2 * SIZE sees block 1 only
    assert manager.share_prompt(child, leader, 2) == ([DUMMY_BLOCK, leader.tables[0][1]],)
    manager.commit(leader, tokens(4 * SIZE), 3 * SIZE)
    assert manager.share_prompt(child, leader, 2) == NO_BLOCKS


def test_the_usage_is_the_share_of_the_blocks_that_requests_may_have() -> None:
    manager = make(4)
    for num_blocks in range(1, 5):
        blocks = manager.new_request("")
        assert manager.usage == (num_blocks - 1) / 4
        manager.allocate_slots(blocks, SIZE)
    assert manager.usage == 1.0


def test_hits_that_others_use_take_no_free_block() -> None:
    manager = make(4)
    running = compute(manager, tokens(2 * SIZE + 1))
    blocks = manager.new_request("")
    computed = manager.get_computed_blocks(blocks, tokens(3 * SIZE))
    assert len(computed[0]) == 2 and manager.pool.num_free_blocks == 1
    assert manager.allocate_slots(blocks, 3 * SIZE, computed) == 3
    manager.check_integrity([running, blocks])


@pytest.mark.parametrize(
    "windows", [(None,), (SIZE,), (2 * SIZE + 1,), (None, SIZE), (SIZE + 2, 3 * SIZE), (None, 1, SIZE)]
)
def test_a_hit_is_the_longest_beginning_that_every_group_can_continue(windows: tuple[int | None, ...]) -> None:
    """Against the definition, over caches of which random blocks were evicted."""
    rng, num_blocks = random.Random(0), 6
    manager = make(100, *windows)
    names = manager.new_request("")
    manager._hasher.extend(names.root, names.hashes, tokens(num_blocks * SIZE), num_blocks)
    for _ in range(60):
        cached = {(group, i) for group in range(len(windows)) for i in range(num_blocks) if rng.random() < 0.7}
        manager = make(100, *windows)
        for group, i in cached:
            (block_id,) = manager.pool.allocate(1)
            manager.pool.register(block_id, (names.hashes[i], group))
            manager.pool.free([block_id])

        def can_continue(count: int, cached: set[tuple[int, int]] = cached) -> bool:
            """Whether the token at `count` blocks finds all that it sees."""
            return all(
                (group, position // SIZE) in cached
                for group, window in enumerate(windows)
                for position in range(0 if window is None else max(0, count * SIZE - window + 1), count * SIZE)
            )

        assert num_hits(manager, tokens(num_blocks * SIZE + 1)) == SIZE * max(
            filter(can_continue, range(num_blocks + 1))
        )


def test_each_block_is_looked_at_once() -> None:
    """`commit` is called in each step in which a block becomes full, so it must not go over the whole sequence again."""
    manager, registered = make(20, None, SIZE), list[tuple[int, int]]()
    register = manager.pool.register
    manager.pool.register = lambda block_id, key: (registered.append((block_id, key[1])), register(block_id, key))[1]  # type: ignore[method-assign]
    blocks = manager.new_request("")
    assert not manager.has_full_blocks(blocks, 0) and not manager.has_full_blocks(blocks, SIZE - 1)
    for count in range(1, 8 * SIZE):
        manager.allocate_slots(blocks, count)
        assert manager.has_full_blocks(blocks, count) == (count % SIZE == 0)
        if manager.has_full_blocks(blocks, count):
            manager.commit(blocks, tokens(count), count)
            assert not manager.has_full_blocks(blocks, count)
    assert len(registered) == len(set(registered)) == 2 * 7


# -- after a reset -----------------------------------------------------------------------------------------------------


def test_a_request_that_runs_over_a_reset_names_no_block_any_more() -> None:
    manager = make(8)
    running = compute(manager, tokens(SIZE))
    manager.reset_prefix_cache([running])
    manager.allocate_slots(running, 4 * SIZE)
    manager.commit(running, tokens(4 * SIZE), 4 * SIZE)
    assert num_hits(manager, tokens(4 * SIZE)) == 0
    manager.free(running)
    assert manager.pool._index == {}
    # preempted, it is computed anew: what it computes now may be found
    assert manager.get_computed_blocks(running, tokens(4 * SIZE)) == ([],)
    manager.allocate_slots(running, 4 * SIZE, ([],))
    manager.commit(running, tokens(4 * SIZE), 4 * SIZE)
    assert num_hits(manager, tokens(4 * SIZE + 1)) == 4 * SIZE


def test_a_child_of_a_leader_that_runs_over_a_reset_names_no_block_either() -> None:
    """It shares what was computed before; what it computes behind that is made of it."""
    manager = make(8)
    leader = compute(manager, tokens(2 * SIZE))
    child = manager.new_request("")
    manager.reset_prefix_cache([leader])
    manager.allocate_slots(child, 4 * SIZE, manager.share_prompt(child, leader, 2))
    manager.commit(child, tokens(4 * SIZE), 4 * SIZE)
    assert manager.pool._index == {}
    manager.free(child)
    manager.free(leader)
    assert num_hits(manager, tokens(4 * SIZE)) == 0


def test_what_was_cached_before_a_reset_is_free_after_it() -> None:
    manager = make(4)
    manager.free(compute(manager, tokens(4 * SIZE)))
    manager.reset_prefix_cache([])
    assert num_hits(manager, tokens(4 * SIZE)) == 0
    assert manager.pool.num_free_blocks == 4
    manager.check_integrity([])


# -- recurrent layers ----------------------------------------------------------------------------------------------


def make_hybrid(num_blocks: int, *, caching: bool = True, checkpoint: int = 3 * SIZE) -> KVCacheManager:
    """A group with attention and a group with states, which has a snapshot every three blocks."""
    attention = KVCacheSpec(block_size=SIZE, num_kv_heads=1, head_dim=1, dtype="float32", itemsize=4)
    state = KVCacheSpec.of_state(SIZE, 16)
    groups = tuple(KVCacheGroup(layer_names=(str(i),), spec=spec) for i, spec in enumerate((attention, state)))
    config = KVCacheConfig(num_blocks=num_blocks + 1, block_bytes=64, groups=groups)
    return KVCacheManager(config, fingerprint="m", enable_prefix_caching=caching, checkpoint_tokens=checkpoint)


def ending_in_7(num_blocks: int) -> Int32Array:
    return np.append(tokens(num_blocks * SIZE), np.int32(7))


def has_block(manager: KVCacheManager, blocks: RequestBlocks) -> list[bool]:
    return [block_id != DUMMY_BLOCK for block_id in blocks.tables[1]]


def test_a_step_writes_its_last_state_and_snapshots() -> None:
    manager = make_hybrid(100)
    blocks = manager.new_request("", num_prompt_tokens=8 * SIZE + 1)
    assert manager.allocate_slots(blocks, 10 * SIZE) == 10
    # after each third block, after the prompt (8 blocks and a token), and at the end of the step
    assert [i + 1 for i, is_there in enumerate(has_block(manager, blocks)) if is_there] == [3, 6, 8, 9, 10]
    manager.commit(blocks, tokens(10 * SIZE), 10 * SIZE)
    assert [i + 1 for i, is_there in enumerate(has_block(manager, blocks)) if is_there] == [10]
    manager.check_integrity([blocks])
    other = make_hybrid(100, caching=False)
    blocks = other.new_request("", num_prompt_tokens=9 * SIZE)
    assert other.allocate_slots(blocks, 10 * SIZE) == 10
    assert has_block(other, blocks) == [False] * 9 + [True]


@pytest.mark.parametrize(("checkpoint", "blocks"), [(1, [1, 2, 3, 4, 5]), (5, [1, 2, 3, 5]), (10, [2, 5]), (99, [])])
def test_snapshots_end_before_multiples_of_the_distance(checkpoint: int, blocks: list[int]) -> None:
    manager = make_hybrid(100, checkpoint=checkpoint)
    request = manager.new_request("", num_prompt_tokens=1)
    assert manager.allocate_slots(request, 6 * SIZE) == 6
    assert [i + 1 for i, is_there in enumerate(has_block(manager, request)[:-1]) if is_there] == blocks


@pytest.mark.parametrize(("length", "hits"), [(2, 0), (3, 3), (5, 3), (6, 6), (7, 6), (8, 8), (9, 9), (12, 9)])
def test_a_hit_ends_at_a_snapshot(length: int, hits: int) -> None:
    manager = make_hybrid(100)
    blocks = manager.new_request("", num_prompt_tokens=8 * SIZE + 1)
    assert manager.allocate_slots(blocks, 10 * SIZE) == 10
    manager.commit(blocks, tokens(10 * SIZE), 10 * SIZE)
    for is_running in (True, False):
        assert num_hits(manager, ending_in_7(length)) == hits * SIZE, is_running
        manager.free(blocks)
    request = manager.new_request("")
    wanted = ending_in_7(length)
    computed = manager.get_computed_blocks(request, wanted)
    assert manager.allocate_slots(request, len(wanted), computed) is not None
    if hits:
        assert has_block(manager, request)[:hits] == [False] * (hits - 1) + [True]
    manager.check_integrity([request])


def test_decoding_moves_the_state_from_block_to_block() -> None:
    manager = make_hybrid(100)
    blocks = manager.new_request("", num_prompt_tokens=2)
    for length in range(2, 8 * SIZE):
        assert manager.allocate_slots(blocks, length) is not None
        assert blocks.tables[1][-1] != DUMMY_BLOCK and blocks.tables[1][(length - 2) // SIZE] != DUMMY_BLOCK
        if manager.has_full_blocks(blocks, length):
            manager.commit(blocks, tokens(length), length)
        assert sum(has_block(manager, blocks)) <= 2
        manager.check_integrity([blocks])
    manager.free(blocks)
    assert num_hits(manager, tokens(8 * SIZE)) == 6 * SIZE


def decode(manager: KVCacheManager, blocks: RequestBlocks, stop: int, stride: int = 1) -> None:
    """Compute tokens [2, stop), `stride` in a step: several if drafts are accepted, or a grammar forces tokens."""
    for length in [*range(2, stop, stride), stop]:
        assert manager.allocate_slots(blocks, length) is not None
        if manager.has_full_blocks(blocks, length):
            manager.commit(blocks, tokens(length), length)


@pytest.mark.parametrize("stride", [1, 2, 3, SIZE])
@pytest.mark.parametrize(
    ("length", "hits"), [(2, 0), (SIZE - 1, 0), (SIZE, 1), (5 * SIZE - 1, 4), (5 * SIZE, 5), (5 * SIZE + 1, 5)]
)
def test_the_next_message_goes_on_from_the_last_full_block_of_the_answer(length: int, hits: int, stride: int) -> None:
    manager = make_hybrid(100, checkpoint=1000)
    blocks = manager.new_request("", num_prompt_tokens=2)
    decode(manager, blocks, length, stride)
    assert manager.name_last_state(blocks) is (hits > 0)
    manager.check_integrity([blocks])
    manager.free(blocks)
    assert not manager.name_last_state(blocks)
    assert num_hits(manager, tokens(8 * SIZE)) == hits * SIZE
    assert len(manager.pool.cached_keys()) == hits + (hits > 0)  # keys and values of each full block, and one state
    again = manager.new_request("", num_prompt_tokens=2)
    wanted = tokens(8 * SIZE)
    assert manager.allocate_slots(again, len(wanted), manager.get_computed_blocks(again, wanted)) is not None
    manager.check_integrity([again])


def test_a_preempted_request_makes_this_snapshot_again() -> None:
    """So its state can be fetched from a tier, and is written when the request is computed anew."""
    manager = make_hybrid(100, checkpoint=1000)
    blocks = manager.new_request("", num_prompt_tokens=2)
    decode(manager, blocks, 5 * SIZE + 2)
    assert len(KeptBlocks(manager).keys_at(blocks, 4)) == 1
    assert manager.name_last_state(blocks)
    manager.free(blocks)
    assert [len(KeptBlocks(manager).keys_at(blocks, index)) for index in range(5)] == [1, 1, 1, 1, 2]
    manager.reset_prefix_cache([])
    assert manager.allocate_slots(blocks, 6 * SIZE) == 6
    assert [i + 1 for i, is_there in enumerate(has_block(manager, blocks)) if is_there] == [5, 6]


def test_a_follower_leaves_no_state_that_its_leader_computes() -> None:
    """The step that computes it may still fail."""
    manager = make_hybrid(100, checkpoint=1000)
    leader = manager.new_request("", num_prompt_tokens=4 * SIZE + 2)
    assert manager.allocate_slots(leader, 4 * SIZE + 1) == 5
    follower = manager.new_request("", num_prompt_tokens=4 * SIZE + 2)
    manager.name_blocks(follower, tokens(4 * SIZE + 2))
    assert manager.allocate_slots(follower, 4 * SIZE + 2, manager.share_prompt(follower, leader, 4)) == 5
    follower.num_committed = 4  # as when it is admitted
    assert not manager.name_last_state(follower) and not manager.pool.cached_keys()
    manager.commit(leader, tokens(4 * SIZE + 1), 4 * SIZE + 1)
    manager.commit(follower, tokens(5 * SIZE), 5 * SIZE)
    assert manager.name_last_state(follower)
    manager.free(follower)
    assert num_hits(manager, tokens(8 * SIZE)) == 5 * SIZE


def test_which_requests_leave_no_state() -> None:
    forgotten = make_hybrid(100, checkpoint=1000)
    blocks = forgotten.new_request("", num_prompt_tokens=2)
    decode(forgotten, blocks, 5 * SIZE)
    forgotten.reset_prefix_cache([blocks])  # it may depend on what was forgotten
    assert not forgotten.name_last_state(blocks)
    for manager in (make_hybrid(100, caching=False), make(100)):
        blocks = manager.new_request("", num_prompt_tokens=2)
        decode(manager, blocks, 5 * SIZE)
        assert not manager.name_last_state(blocks)
    few = make_hybrid(100, checkpoint=1000)
    blocks = few.new_request("", num_prompt_tokens=9 * SIZE)
    assert few.allocate_slots(blocks, 4 * SIZE + 1) == 5
    few.commit(blocks, tokens(4 * SIZE + 1), 4 * SIZE + 1)  # a part of the prompt, whose last full block has no state
    assert not few.name_last_state(blocks) and num_hits(few, tokens(8 * SIZE)) == 0


def named(manager: KVCacheManager, num_blocks: int, num_prompt_tokens: int) -> RequestBlocks:
    """A request that has names for its blocks, and no blocks."""
    blocks = manager.new_request("", num_prompt_tokens)
    assert manager.name_blocks(blocks, tokens(num_blocks * SIZE + 1)) == num_blocks
    return blocks


def test_which_keys_a_commit_names() -> None:
    """Of each block keys and values, and the state if it is a snapshot. Later tokens need all of the former only."""
    manager = make_hybrid(100)
    blocks = named(manager, 10, 8 * SIZE + 1)
    keys = {index: KeptBlocks(manager).keys_at(blocks, index) for index in range(10)}
    assert [len(keys[index]) for index in range(10)] == [1, 1, 2, 1, 1, 2, 1, 2, 2, 1]
    assert keys[2] == [((blocks.hashes[2], 0), True), ((blocks.hashes[2], 1), False)]
    assert manager.allocate_slots(blocks, 10 * SIZE) == 10
    manager.commit(blocks, tokens(10 * SIZE), 10 * SIZE)
    assert set(manager.pool.cached_keys()) == {key for found in keys.values() for key, _ in found}


def test_which_keys_a_commit_names_with_a_window() -> None:
    """Those of the window only before the end of the prompt, where prompts part, at the end, and one in KEPT_SHARE."""
    manager = make(100, None, SIZE + 1)
    blocks = named(manager, 9, 2 * SIZE + 1)
    blocks.num_shared, blocks.num_before_last_state = 5, 9
    for index in range(9):
        name = blocks.hashes[index]
        expected = [((name, 0), True)] + [((name, 1), False)] * (index in (1, 4, 7, 8))
        assert KeptBlocks(manager).keys_at(blocks, index) == expected, index


@pytest.mark.parametrize(
    ("missing", "hit"), [(None, 8), ((7, 1), 6), ((6, 1), 8), ((7, 0), 6), ((4, 0), 3), ((1, 0), 0)]
)
def test_what_is_found_anywhere_is_a_hit_if_it_is_enough(missing: tuple[int, int] | None, hit: int) -> None:
    """`find` says where a block is. Of 8 blocks, one key is nowhere: (its index, its group)."""
    manager = make_hybrid(100)
    blocks = named(manager, 8, 8 * SIZE + 1)
    known = {key for index in range(8) for key, _ in KeptBlocks(manager).keys_at(blocks, index)}
    if missing is not None:
        known.discard((blocks.hashes[missing[0]], missing[1]))
    found = manager.longest_hit(blocks, 8, lambda key: 1 if key in known else None)
    assert found == hit
    assert set(KeptBlocks(manager).needed_keys(blocks, found)) <= known
    assert manager.longest_hit(blocks, 7, lambda key: 1 if key in known else None) <= min(hit, 7)


def test_the_keys_that_a_hit_needs() -> None:
    """All keys and values before it, and one state; in the order of the tokens, so that the last ones are evicted first."""
    manager = make_hybrid(100)
    blocks = named(manager, 8, 8 * SIZE + 1)
    names = blocks.hashes
    assert KeptBlocks(manager).needed_keys(blocks, 3) == [(names[0], 0), (names[1], 0), (names[2], 0), (names[2], 1)]
    assert KeptBlocks(manager).needed_keys(blocks, 0) == []
    windowed = make(100, None, SIZE + 2)  # the token at 4 * SIZE sees 5 tokens before it
    needed = KeptBlocks(windowed).needed_keys(named(windowed, 8, 9), 4)
    assert [(group, names.index(name)) for name, group in needed] == [(0, 0), (0, 1), (0, 2), (1, 2), (0, 3), (1, 3)]


def test_what_others_hold_is_no_leak() -> None:
    manager = make(8)
    held = manager.pool.allocate(2)
    with pytest.raises(AssertionError):
        manager.check_integrity([])
    manager.check_integrity([], {held[0]: 1, held[1]: 1, 7: 0})
    with pytest.raises(AssertionError):
        manager.check_integrity([], {held[0]: 2, held[1]: 1})


def test_snapshots_are_left_out_before_a_request_is_refused() -> None:
    manager = make_hybrid(9 + 3)
    blocks = manager.new_request("", num_prompt_tokens=8 * SIZE + 1)
    assert manager.allocate_slots(blocks, 9 * SIZE) == 9
    assert [i + 1 for i, is_there in enumerate(has_block(manager, blocks)) if is_there] == [6, 8, 9]
    assert manager.pool.num_free_blocks == 0
    manager.check_integrity([blocks])
    manager.free(blocks)
    assert manager.allocate_slots(blocks, 12 * SIZE) is None
    assert manager.allocate_slots(blocks, 11 * SIZE) == 11


@pytest.mark.parametrize(("num_prompt_tokens", "blocks"), [(4 * SIZE, [3]), (4 * SIZE + 1, [4]), (1, []), (SIZE, [])])
def test_the_snapshot_of_a_prompt_is_behind_its_last_full_block_that_others_can_share(
    num_prompt_tokens: int, blocks: list[int]
) -> None:
    """The last token of a prompt is always computed, so a block that ends with it is of no use to an equal prompt."""
    manager = make_hybrid(100, checkpoint=1000)
    request = manager.new_request("", num_prompt_tokens=num_prompt_tokens)
    assert manager.allocate_slots(request, 6 * SIZE) == 6
    assert [i + 1 for i, is_there in enumerate(has_block(manager, request)[:-1]) if is_there] == blocks


def test_followers_begin_with_the_state_after_the_prompt() -> None:
    manager = make_hybrid(100)
    leader = manager.new_request("", num_prompt_tokens=4 * SIZE + 2)
    assert manager.allocate_slots(leader, 4 * SIZE + 1) == 5
    follower = manager.new_request("", num_prompt_tokens=4 * SIZE + 2)
    shared = manager.share_prompt(follower, leader, 4)
    assert [len(table) for table in shared] == [4, 4] and shared[1][:3] == [DUMMY_BLOCK] * 3
    assert shared[1][3] == leader.tables[1][3] != DUMMY_BLOCK
    assert manager.allocate_slots(follower, 4 * SIZE + 2, shared) == 5
    manager.check_integrity([leader, follower])
    decode(manager, leader, 5 * SIZE)
    assert manager.share_prompt(follower, leader, 4) == NO_BLOCKS  # freed: the leader goes on from its fifth block


def test_what_joins_and_leaves_the_prefix_cache_is_noted() -> None:
    """Of the first group. What comes and goes between two reports is told as it is at the end."""
    manager = make(6, None, 8)
    names = manager.watch_names()
    first = compute(manager, tokens(2 * SIZE + 1))
    manager.free(first)
    assert names.take() == dict.fromkeys(first.hashes, True) == names.present()
    assert names.take() == {}
    second = compute(manager, tokens(3 * SIZE, first=100))  # six blocks: the first prompt is evicted
    assert names.take() == {**dict.fromkeys(first.hashes, False), **dict.fromkeys(second.hashes, True)}
    manager.free(second)
    manager.free(compute(manager, tokens(SIZE, first=200)))
    manager.reset_prefix_cache([])
    assert not any(names.take().values()) and names.present() == {}


def test_in_a_model_with_states_the_cached_names_are_those_of_the_attention_blocks() -> None:
    attention = KVCacheSpec(block_size=SIZE, num_kv_heads=1, head_dim=1, dtype="float32", itemsize=4)
    groups = [
        KVCacheGroup(layer_names=(str(i),), spec=spec)
        for i, spec in enumerate((KVCacheSpec.of_state(SIZE, 16), attention))
    ]
    config = KVCacheConfig(num_blocks=10, block_bytes=64, groups=tuple(groups))
    manager = KVCacheManager(config, fingerprint="m", enable_prefix_caching=True)
    names = manager.watch_names()
    blocks = compute(manager, tokens(2 * SIZE + 1))
    assert names.take() == dict.fromkeys(blocks.hashes[:2], True)
