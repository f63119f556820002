"""`KVTransfers`: how long a request waits for its blocks, and how this is measured."""

from __future__ import annotations

import pytest

from inflight.scheduler import kv_transfers
from inflight.scheduler.kv_fetches import SMOOTHING
from tests.unit.scheduler.transfer_bench import TIER, Bench, Clock, clock, tokens, with_tiers

__all__ = ["clock"]


@pytest.mark.parametrize(
    ("compute", "fetch", "wait"),
    [(1.0, 0.1, 0.2), (1.0, 0.4, 0.6), (1.0, 0.9, 1.0), (1.0, 0.0, 0.2), (0.0, 0.4, kv_transfers.UNKNOWN_WAIT_SECONDS)],
)
def test_a_request_waits_no_longer_than_computing_takes(
    compute: float, fetch: float, wait: float, clock: Clock
) -> None:
    """`compute` and `fetch`: seconds for all 8 blocks; 0: not measured."""
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(33))
    bench.transfers._token_seconds, bench.transfers._fetches.block_seconds = compute / 32, fetch / 8
    request = bench.request(tokens(33))
    assert bench.begin(request)
    clock.now += wait - 0.001
    bench.transfers.settle()
    assert bench.transfers.awaits(request)
    clock.now += 0.002
    bench.transfers.settle()
    assert not bench.transfers.awaits(request)


def test_the_host_pool_is_waited_for_even_if_the_tiers_are_not_worth_it(clock: Clock) -> None:
    """Of 4 blocks the host pool has 2. After their load the request waits for the tiers, but not as long as computing would
    take."""
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(17))
    bench.save(tokens(9))
    bench.forget_arena()
    bench.transfers._token_seconds, bench.transfers._fetches.block_seconds = 0.1, 0.1
    request = bench.request(tokens(17))
    assert bench.begin(request)
    clock.now += kv_transfers.UNKNOWN_WAIT_SECONDS - 0.01
    bench.transfers.settle()
    assert bench.transfers.awaits(request)
    bench.end("load", True)
    clock.now += 0.29
    bench.transfers.settle()
    assert bench.transfers.awaits(request)
    clock.now += 0.02
    bench.transfers.settle()
    assert not bench.transfers.awaits(request)
    bench.end_fetch()
    bench.check_idle()


def test_a_slow_tier_is_left_out_and_tried_again_while_the_request_computes(clock: Clock) -> None:
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(9))
    bench.transfers._token_seconds, bench.transfers._fetches.block_seconds = 0.01, 1.0

    def is_fetched() -> bool:
        request = bench.request(tokens(9))
        assert not bench.begin(request) and not bench.transfers.awaits(request)
        return bool(bench.pending("fetch"))

    assert is_fetched()  # the first try
    clock.now += 5.0
    bench.tiers.clear()
    bench.end_fetch()
    assert not is_fetched()
    clock.now += kv_transfers.PROBE_SECONDS - 5.1
    assert not is_fetched()
    clock.now += 0.2
    assert is_fetched()
    bench.end_fetch()
    bench.check_idle()


def test_a_tier_that_has_become_fast_is_used_again(clock: Clock) -> None:
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(9))
    bench.transfers._token_seconds, bench.transfers._fetches.block_seconds = 0.01, 0.1
    for _ in range(3):  # tries in which the tier takes no time
        assert not bench.begin(bench.request(tokens(9)))
        bench.end_fetch()
        bench.transfers.reset(with_host_pool=True)
        clock.now += kv_transfers.PROBE_SECONDS
    assert bench.transfers._fetches.block_seconds < 0.04
    clock.now -= kv_transfers.PROBE_SECONDS  # no try is due
    assert bench.begin(bench.request(tokens(9)))
    bench.end_fetch()
    bench.end("load", True)
    bench.check_idle()


def test_how_fast_a_tier_is_depends_on_the_blocks_that_were_fetched(clock: Clock) -> None:
    """Not on those that the request has computed meanwhile, and not on the fetch of one block alone: fetches overlap."""
    bench = Bench(num_blocks=100, num_slots=100, tiers=(TIER,))
    with_tiers(bench, tokens(61))
    assert bench.begin(bench.request(tokens(61)))
    sizes = []
    while calls := bench.pending("fetch"):
        sizes.append(len(calls[0][0]))
        if sizes == [2]:  # of the next four blocks, one has been computed
            bench.kv_cache.free(bench.compute(tokens(13)).blocks)
        clock.now += 0.1 * sizes[-1] if sizes[-1] > 1 else 100.0
        bench.end_fetch()
    assert sizes == [2, 3, 8, 1] and bench.transfers._fetches.block_seconds == pytest.approx(0.1)


def test_after_a_reset_a_fetch_ends(clock: Clock) -> None:
    bench = Bench(num_blocks=100, num_slots=100, tiers=(TIER,))
    with_tiers(bench, tokens(49))
    request = bench.request(tokens(49))
    assert bench.begin(request)
    bench.end_fetch()
    bench.kv_cache.reset_prefix_cache([])
    bench.transfers.reset(with_host_pool=True)
    bench.transfers.forget_tiers()
    bench.end_fetch()
    assert not bench.transfers.awaits(request)
    bench.check_idle()


@pytest.mark.parametrize("action", ["save", "load", "fetch"])
def test_a_copy_ends_when_the_ranks_have_ended_it(action: str, clock: Clock) -> None:
    """And not when the engine comes to look, which can be a long step later."""
    bench = Bench(tiers=(TIER,))
    if action == "save":
        bench.kv_cache.free(bench.compute(tokens(9)).blocks)
    else:
        with_tiers(bench, tokens(9))
        bench.begin(bench.request(tokens(9)))
        if action == "load":
            bench.end_fetch()
    bench.counts()
    clock.now += 0.5
    call = bench.take(action)
    call.future.set_result([([True, True], {})] if action == "fetch" else [True])
    clock.now += 60.0
    bench.transfers.settle()
    counts = bench.counts()
    seconds = {
        "save": counts.save_seconds,
        "load": counts.load_seconds,
        "fetch": 2 * bench.transfers._fetches.block_seconds,
    }
    assert seconds[action] == pytest.approx(0.5)


def test_only_steps_of_prompts_tell_how_fast_tokens_are_computed() -> None:
    transfers = Bench().transfers
    transfers.end_step(8, 8, 0.5)  # decodes
    transfers.end_step(800, 8, 0.0)  # not measured
    assert transfers._token_seconds == 0.0
    transfers.end_step(800, 8, 0.8)
    assert transfers._token_seconds == pytest.approx(0.001)
    transfers.end_step(800, 8, 1.6)
    assert transfers._token_seconds == pytest.approx(0.001 + SMOOTHING * 0.001)
