"""`KVTouches`: tiers are told of the blocks that are used near the arena, and get again what they have lost."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.scheduler import kv_touches
from inflight.scheduler.kv_touches import SAVED_SHARE, TOUCH_SECONDS
from tests.unit.scheduler.transfer_bench import TIER, Bench, Clock, clock, tokens

__all__ = ["clock"]  # a fixture
PROMPT = tokens(21)  # five blocks


@pytest.fixture(autouse=True)
def _same_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_touches, "time", clock)


def bench_with_prompt(**more: Any) -> Bench:
    """The arena, the host pool and the tiers have the prompt."""
    bench = Bench(**{"num_blocks": 100, "num_slots": 100, "tiers": (TIER,), **more})
    bench.save(PROMPT)
    return bench


def touched(bench: Bench, first: int = 0) -> list[int]:
    """A request with this prompt comes. Returns how many blocks the tiers were told of."""
    bench.begin(bench.request(tokens(21, first)))
    return [len(keys) for (keys,) in bench.pending("touch")]


def test_tiers_are_told_once_in_a_while(clock: Clock) -> None:
    bench = bench_with_prompt()
    assert touched(bench) == [], "they have just got it"
    for _ in range(2):
        clock.now += TOUCH_SECONDS
        assert touched(bench) == [5]
        bench.end("touch", ([True] * 5, {}))
        assert touched(bench) == []
    bench.check_idle()


def test_a_tier_with_a_time_to_live_is_told_in_a_quarter_of_it(clock: Clock) -> None:
    tiers = (KVTierConfig(type="redis", url="redis://nowhere", ttl_seconds=4),)
    bench = bench_with_prompt(tiers=tiers)
    clock.now += 0.9
    assert touched(bench) == []
    clock.now += 0.1
    assert touched(bench) == [5]


def test_when_much_was_saved_tiers_are_told_sooner() -> None:
    """A small tier drops its oldest objects in less time."""
    bench = bench_with_prompt()
    for first in range(1000, 9000, 1000):
        if touched(bench):
            break
        bench.save(tokens(21, first))
    assert touched(bench) == [5] and first == 1000 * (1 + 101 // SAVED_SHARE // 5)


def test_without_tiers_nobody_is_told(clock: Clock) -> None:
    bench = bench_with_prompt(tiers=())
    clock.now += 10 * TOUCH_SECONDS
    assert touched(bench) == []


@pytest.mark.parametrize("has_host_pool", [True, False])
def test_what_a_tier_has_lost_is_stored_again(clock: Clock, has_host_pool: bool) -> None:
    bench = bench_with_prompt()
    if not has_host_pool:
        bench.transfers.host_pool.forget_all()
    clock.now += TOUCH_SECONDS
    assert touched(bench) == [5]
    bench.end("touch", ([True, False, True, False, True], {}))
    if has_host_pool:
        ((keys, slots),) = bench.pending("restore")
        assert len(keys) == len(slots) == 2
        assert bench.transfers.host_pool.count_free(slots) == 0, "they are not evicted meanwhile"
        bench.end("restore", (True, {}))
    bench.transfers.end_step(1, 1, 0.0)
    saved = bench.pending("save")
    assert [len(blocks) for _, blocks, _, _ in saved] == ([] if has_host_pool else [2])
    if saved:
        bench.end("save", True)
        bench.end("stored", (True, {}))
    bench.check_idle()


@pytest.mark.parametrize("in_host_pool", [5, 3, 0])
def test_the_tiers_are_told_of_whole_chunks(clock: Clock, in_host_pool: int) -> None:
    """A chunk of four blocks, and the last block alone. Both are lost."""
    chunks = KVTierConfig(type="obj", url="memory:///", blocks_per_chunk=4)
    bench = Bench(num_blocks=100, num_slots=100, tiers=(chunks,))
    request = bench.compute(PROMPT)
    bench.transfers.record_release(request, has_last_state=False)
    bench.transfers.end_step(1, 1, 0.0)
    bench.kv_cache.free(request.blocks)
    while bench.pending("save"):
        bench.end("save", True)
        bench.end("stored", (True, {}))
    for key in [(name, 0) for name in request.blocks.hashes[in_host_pool:5]]:
        slot = bench.transfers.host_pool.lookup(key)
        assert slot is not None
        bench.transfers.host_pool._forget(slot)
        bench.transfers.host_pool._cached.pop(slot)
        bench.transfers.host_pool._empty.append(slot)
    clock.now += TOUCH_SECONDS
    assert touched(bench) == [2]
    assert [len(together) for together in bench.pending("touch")[0][0]] == [4, 1]
    bench.end("touch", ([False, False], {}))
    restored = [len(together) for keys, _ in bench.pending("restore") for together in keys]
    assert restored == {5: [4, 1], 3: [], 0: []}[in_host_pool]
    if restored:
        bench.end("restore", (True, {}))
    bench.transfers.end_step(1, 1, 0.0)
    saved = [len(together) for *_, keys in bench.pending("save") for together in keys]
    assert saved == {5: [], 3: [1, 1], 0: [4, 1]}[in_host_pool]
    while bench.pending("save"):
        bench.end("save", True)
        bench.end("stored", (True, {}))
    bench.check_idle()


def test_what_a_near_tier_gives_again_and_again_the_far_ones_are_told_of(clock: Clock) -> None:
    """Arena and host pool are small, so the prompt is fetched from the first tier each time. The second one would never
    know."""
    bench = bench_with_prompt()
    bench.tiers.update(bench.transfers.wire_keys(bench.kv_cache.pool.cached_keys()))
    told = []
    for _ in range(6):
        clock.now += TOUCH_SECONDS / 2
        bench.forget_arena()
        bench.transfers.reset(with_host_pool=True)
        assert bench.begin(bench.request(PROMPT))
        while bench.pending("fetch"):
            assert all(bench.end_fetch())
        told.append(sum(len(keys) for (keys,) in bench.pending("touch")))
        while bench.pending("touch"):
            bench.end("touch", ([True] * len(bench.pending("touch")[0][0]), {}))
        bench.end("load", True)
    assert told == [0, 5] * 3
    bench.check_idle()


def test_who_only_loads_stores_nothing_again(clock: Clock) -> None:
    bench = bench_with_prompt()
    bench.transfers._touches._saves = False
    clock.now += TOUCH_SECONDS
    assert touched(bench) == [5]
    bench.end("touch", ([False] * 5, {}))
    bench.transfers.end_step(1, 1, 0.0)
    bench.check_idle()


def test_the_hottest_prompt_outlives_others_in_a_tier_of_least_recent_use() -> None:
    """300 requests begin with it and go on in other ways. The tier has room for a fraction of their blocks. Before, it lost the
    prompt, because it had not seen any use of it."""
    bench = bench_with_prompt()
    age: dict[bytes, int] = {}
    now = 0

    def run() -> None:
        nonlocal now
        while bench.calls:
            for action, *_ in [(each.action,) for each in bench.calls]:
                now += 1
                if action == "save":
                    keys = [key for together in bench.pending("save")[0][3] for key in together]
                    age.update(dict.fromkeys(keys, now))
                    bench.end("save", True)
                elif action == "touch":
                    (keys,) = bench.pending("touch")[0]
                    has = [key in age for (key,) in keys]
                    age.update({key: now for (key,) in keys if key in age})
                    bench.end("touch", (has, {}))
                elif action == "restore":
                    age.update({key: now for (key,) in bench.pending("restore")[0][0]})
                    bench.end("restore", (True, {}))
                else:
                    bench.end(action, (True, {}))
                while len(age) > 120:
                    del age[min(age, key=lambda key: age[key])]
                break
        bench.transfers.end_step(1, 1, 0.0)

    hot = bench.transfers.wire_keys(bench.kv_cache.pool.cached_keys())
    age.update(dict.fromkeys(hot, 0))
    for user in range(300):
        prompt = tokens(21)
        longer = bench.request(prompt)
        bench.begin(longer)
        run()
        bench.kv_cache.free(bench.compute(tokens(9, 1000 + 100 * user)).blocks)
        run()
    assert len(age) == 120 and set(hot) <= set(age)
