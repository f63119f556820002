"""`BlockPool`: states of a block, order of eviction, and its invariants under random use."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.interface.kv_cache import DUMMY_BLOCK
from inflight.kv_cache.block_pool import BlockPool


def key(i: int) -> tuple[bytes, int]:
    return (bytes([i]) * 32, 0)


def test_the_dummy_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert (pool.num_free_blocks, pool.describe()) == (4, "4 of 4 KV blocks are free")
    assert DUMMY_BLOCK not in pool.allocate(4)
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_contents_leave_in_the_order_of_their_last_use() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for i, block_id in enumerate(blocks):
        pool.register(block_id, key(i))
    pool.free(blocks)
    pool.touch([blocks[0]])  # used again: now the youngest
    pool.free([blocks[0]])
    assert pool.allocate(1) == [blocks[1]]
    assert [pool.lookup(key(i)) for i in range(3)] == [blocks[0], None, blocks[2]]


def test_blocks_without_content_are_reused_before_contents_are_evicted() -> None:
    pool = BlockPool(3)
    named, plain = pool.allocate(2)
    pool.register(named, key(1))
    pool.free([named])
    pool.free([plain])
    assert pool.allocate(1) == [plain]
    assert pool.lookup(key(1)) == named


def test_blocks_that_were_used_before_are_taken_first_and_contents_last() -> None:
    pool = BlockPool(7)
    named, plain, other = pool.allocate(3)
    pool.register(named, key(1))
    pool.free([named])
    pool.free([plain, other])
    taken = pool.allocate(5)
    assert taken[:2] == [other, plain]  # the last one freed is the first: its bytes are warm
    assert sorted(taken[2:]) == [4, 5, 6]  # never used: they come before contents that would be lost
    assert pool.lookup(key(1)) == named
    assert pool.allocate(1) == [named]
    assert pool.lookup(key(1)) is None


def test_requests_one_after_the_other_use_the_same_blocks() -> None:
    """On a CPU memory is used as blocks are touched: a cache that is larger than its use must not be touched in full."""
    pool, seen = BlockPool(1000), set[int]()
    for _ in range(50):
        blocks = pool.allocate(10)
        seen.update(blocks)
        pool.free(blocks)
    assert len(seen) == 10


def test_after_contents_are_forgotten_their_blocks_are_taken_before_untouched_ones() -> None:
    pool = BlockPool(9)
    blocks = pool.allocate(3)
    for i, block_id in enumerate(blocks):
        pool.register(block_id, key(i))
    pool.free(blocks[:2])
    pool.forget_all()
    assert sorted(pool.allocate(2)) == sorted(blocks[:2])
    pool.check_integrity(dict.fromkeys(blocks, 1))


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, key(1))
    pool.register(second, key(1))
    assert pool.lookup(key(1)) == first
    pool.free([second])
    pool.check_integrity({first: 1})


def test_a_block_freed_twice_is_noticed() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError):
        pool.free(blocks)


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(2, 12))
def test_invariants_hold_under_random_use(seed: int, num_blocks: int) -> None:
    rng, pool = random.Random(seed), BlockPool(num_blocks)
    references: dict[int, int] = {}
    for _ in range(60):
        action = rng.choice(["allocate", "free", "touch", "register", "forget"])
        if action == "allocate" and pool.num_free_blocks:
            for block_id in pool.allocate(rng.randint(1, pool.num_free_blocks)):
                assert block_id not in references
                references[block_id] = 1
        elif action == "free" and references:
            block_id = rng.choice(sorted(references))
            pool.free([block_id])
            references[block_id] -= 1
            if not references[block_id]:
                del references[block_id]
        elif action == "touch":
            block_id = pool.lookup(key(rng.randrange(20)))
            if block_id is not None:
                pool.touch([block_id])
                references[block_id] = references.get(block_id, 0) + 1
        elif action == "register" and references:
            block_id = rng.choice(sorted(references))
            if pool._keys[block_id] is None:
                pool.register(block_id, key(rng.randrange(20)))
        elif action == "forget" and rng.random() < 0.1:
            pool.forget_all()
        pool.check_integrity(references)
