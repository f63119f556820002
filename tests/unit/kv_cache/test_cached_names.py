"""`CachedNames`: what has changed since the last report, of one group."""

from __future__ import annotations

from inflight.kv_cache.block_pool import BlockPool
from inflight.kv_cache.cached_names import CachedNames


def test_names_that_join_and_leave() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(blocks[0], (b"old", 1))
    names = CachedNames(pool, 1)
    assert (names.take(), names.present()) == ({}, {b"old": True})
    pool.register(blocks[1], (b"new", 1))
    pool.register(blocks[2], (b"other", 0))
    assert names.take() == {b"new": True}
    assert names.take() == {}
    assert names.present() == {b"old": True, b"new": True}
    pool.free(blocks)
    assert names.take() == {}, "freed blocks are still cached"
    taken = pool.allocate(3)
    pool.register(taken[0], (b"new", 1))
    assert names.take() == {b"old": False, b"new": True}, "it has left and joined again"
    assert names.present() == {b"new": True}


def test_a_name_that_one_of_two_pools_has_is_cached() -> None:
    arena, host_pool = BlockPool(3), BlockPool(5)
    names = CachedNames(arena, 0)
    names.add(host_pool)
    for pool in (arena, host_pool):
        (block_id,) = pool.allocate(1)
        pool.register(block_id, (b"both", 0))
        pool.free([block_id])
    assert names.take() == {b"both": True} == names.present()
    arena.allocate(2)
    assert names.take() == {b"both": True}, "the host pool has it"
    host_pool.forget_all()
    assert names.take() == {b"both": False} and names.present() == {}
