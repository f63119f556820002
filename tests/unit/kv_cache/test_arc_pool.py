"""`ArcPool`: the invariants of a pool, and which blocks it evicts, against ARC written down from its paper."""

from __future__ import annotations

import random

from inflight.kv_cache.arc_pool import ArcPool
from inflight.kv_cache.block_pool import BlockPool

Key = tuple[bytes, int]


def key(number: int) -> Key:
    return number.to_bytes(4), 0


def use(pool: BlockPool, number: int) -> bool:
    """Use a content as `KVTransfers` does. Returns whether the pool had it."""
    slot = pool.lookup(key(number))
    if slot is not None:
        pool.refresh([slot])
        return True
    [slot] = pool.allocate(1)
    pool.register(slot, key(number))
    pool.free([slot])
    return False


class PlainArc:
    """The lists T1, T2, B1 and B2 of the paper, the least recently used first. Its pool evicts when it is full, and a content
    that was evicted from T2 chooses its victim before the target shrinks, because a pool gives out a block before it knows
    what will be in it. Each list of names is bounded by itself."""

    def __init__(self, size: int) -> None:
        self.size, self.target = size, 0.0
        self.once: list[int] = []
        self.again: list[int] = []
        self.gone_once: list[int] = []
        self.gone_again: list[int] = []

    def use(self, number: int) -> bool:
        for each in (self.once, self.again):
            if number in each:
                each.remove(number)
                self.again.append(number)
                return True
        if len(self.once) + len(self.again) == self.size:
            if self.once and (len(self.once) > self.target or not self.again):
                self.gone_once.append(self.once.pop(0))
            else:
                self.gone_again.append(self.again.pop(0))
            for gone in (self.gone_once, self.gone_again):
                if len(gone) > self.size + 1:  # the pool's size counts its dummy block
                    gone.pop(0)
        if number in self.gone_once:
            self.target = min(self.target + max(1, len(self.gone_again) / len(self.gone_once)), self.size + 1)
            self.gone_once.remove(number)
            self.again.append(number)
        elif number in self.gone_again:
            self.target = max(self.target - max(1, len(self.gone_once) / len(self.gone_again)), 0)
            self.gone_again.remove(number)
            self.again.append(number)
        else:
            self.once.append(number)
        return False


def test_it_evicts_what_arc_evicts() -> None:
    for seed in range(30):
        rng, size = random.Random(seed), 1 + seed % 12
        pool, plain = ArcPool(size + 1), PlainArc(size)
        for _ in range(600):
            number = rng.choice([rng.randrange(size), rng.randrange(2 * size), rng.randrange(10 * size)])
            assert use(pool, number) == plain.use(number)
            assert {key(each) for each in plain.once + plain.again} == set(pool.cached_keys())
            pool.check_integrity({})
        assert 0 < len(plain.gone_once) + len(plain.gone_again) <= 2 * size + 2


def hits(pool: BlockPool, numbers: list[int]) -> int:
    return sum(use(pool, number) for number in numbers)


def test_prompts_that_come_once_do_not_displace_those_that_come_again() -> None:
    pools = ArcPool(17), BlockPool(17)
    hot = list(range(8))
    rounds = [number for first in range(1000, 2000, 40) for number in (*hot, *range(first, first + 40))]
    arc, lru = (hits(pool, hot + rounds) for pool in pools)
    assert arc == 25 * len(hot) and lru == 8  # with `lru` only in the first round, before the first strangers come


def test_it_adapts_to_contents_that_come_back_late() -> None:
    """First only a few contents come again and again, then many, one after another: the list of the first ones shrinks."""
    pool = ArcPool(33)
    hits(pool, list(range(32)) * 4)
    later = list(range(100, 130))
    assert hits(pool, later * 6) > 3 * len(later)


def test_blocks_in_use_and_a_reset() -> None:
    for seed in range(20):
        rng, pool = random.Random(seed), ArcPool(9)
        held: list[int] = []
        for _ in range(400):
            kind = rng.random()
            if kind < 0.5 and pool.num_free_blocks:
                use(pool, rng.randrange(20))
            elif kind < 0.7 and pool.num_free_blocks:
                held += pool.allocate(1)
                if rng.random() < 0.5:
                    pool.register(held[-1], key(rng.randrange(20)))
            elif kind < 0.8 and (slot := pool.lookup(key(rng.randrange(20)))) is not None:
                pool.touch([slot])
                held.append(slot)
            elif kind < 0.98 and held:
                pool.free([held.pop(rng.randrange(len(held)))])
            elif kind > 0.98:
                pool.forget_all()
            pool.check_integrity({slot: held.count(slot) for slot in held})
            listed = [*pool._arc.lists[0], *pool._arc.lists[1]]
            assert sorted(listed) == sorted(pool._cached) and len(set(listed)) == len(listed)
        assert max(map(len, pool._evicted)) <= pool.num_blocks
