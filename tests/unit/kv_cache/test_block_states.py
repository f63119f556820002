"""The states of blocks, against what the pool itself says of each of them."""

from __future__ import annotations

import random

from inflight.interface.engine_view import BLOCK_STATES
from inflight.kv_cache.block_pool import BlockPool
from inflight.kv_cache.block_states import block_states


def test_each_block_has_its_state() -> None:
    rng = random.Random(0)
    pool = BlockPool(40)
    held: list[int] = []
    seen = set()
    for i in range(2000):
        choice = rng.random()
        if choice < 0.4 and pool.num_free_blocks:
            (block_id,) = pool.allocate(1)
            held.append(block_id)
            if rng.random() < 0.5:
                pool.register(block_id, (b"%d" % i, 0))
        elif choice < 0.5 and held:
            held.append(rng.choice(held))
            pool.touch(held[-1:])
        elif held:
            pool.free([held.pop(rng.randrange(len(held)))])
        cached = {pool.lookup(key) for key in pool.cached_keys()}
        expected = [
            ("shared" if held.count(each) > 1 else "owned") if each in held else "cached" if each in cached else "free"
            for each in range(1, 40)
        ]
        states = [BLOCK_STATES[state] for state in block_states(pool)]
        assert states[1:] == expected and states[0] == "owned"
        seen |= set(states)
    assert seen == set(BLOCK_STATES)
