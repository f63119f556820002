"""`KVTransfers` one call at a time: what it asks of the ranks, who waits for it, and what is left when something else happens.

The cache, the slab's index and the requests are real; the ranks and the clock are the test's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.config.kv_transfer import KVTransferConfig
from inflight.errors import EngineError, ErrorKind
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.request import EngineCoreRequest, Int32Array, ResolvedSampling
from inflight.interface.statistics import TransferCounts
from inflight.kv_cache.arc_pool import ArcPool
from inflight.kv_cache.manager import KVCacheManager
from inflight.sampling_params import SamplingParams
from inflight.scheduler import kv_transfers
from inflight.scheduler.kv_transfers import KVTransfers
from inflight.scheduler.request import Request

BLOCK_BYTES = 1000
TIER = KVTierConfig(type="fs", path="/nowhere")
SAMPLING = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=10**6)


@dataclass
class Call:
    """A call of all ranks that has not ended."""

    action: str
    args: tuple[Any, ...]
    future: Future[Any]


class Bench:
    """
    Attributes:
        calls: those that have not ended.
        brought: the requests that need not wait any more.
        failed: the arguments of each call of `fail`.
        tiers: the wire keys that the tiers have.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        num_slots: int = 64,
        specs: Sequence[KVCacheSpec] = (),
        windows: Sequence[int | None] = (None,),
        **config: Any,
    ) -> None:
        shape = {"block_size": block_size, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32", "itemsize": 4}
        specs = specs or [KVCacheSpec(**shape, sliding_window=window) for window in windows]
        groups = tuple(KVCacheGroup(layer_names=(f"layers.{i}",), spec=spec) for i, spec in enumerate(specs))
        cache = KVCacheConfig(num_blocks=num_blocks + 1, block_bytes=BLOCK_BYTES, groups=groups)
        self.kv_cache = KVCacheManager(cache, fingerprint="m", enable_prefix_caching=True)
        self.pool, self.block_size = self.kv_cache.pool, block_size
        self.calls: list[Call] = []
        self.brought: list[str] = []
        self.failed: list[tuple[str, str, ErrorKind]] = []
        self.tiers: set[bytes] = set()
        self.num_news = self._num_requests = 0
        self.transfers = KVTransfers(
            self.kv_cache,
            KVTransferConfig(cpu_bytes=1, **config),
            num_slots,
            BLOCK_BYTES,
            lambda args: self._call(*args),
            lambda request: self.brought.append(request.request_id),
            self._note_failure,
        )
        self.transfers.on_news = self._note_news

    def _call(self, action: str, *args: Any) -> Future[Any]:
        self.calls.append(Call(action, args, Future()))
        return self.calls[-1].future

    def _note_news(self) -> None:
        self.num_news += 1

    def _note_failure(self, *args: Any) -> None:
        self.failed.append(args)  # type: ignore[arg-type]

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(self, token_ids: Int32Array, num_prompt_tokens: int | None = None, **limits: int) -> Request:
        self._num_requests += 1
        prompt = token_ids[: num_prompt_tokens or len(token_ids)]
        emitted = tuple(token_ids[len(prompt) :].tolist())
        sampling = replace(SAMPLING, params=SamplingParams(**limits))
        core = EngineCoreRequest(request_id=f"r{self._num_requests}", sampling=sampling, emitted_token_ids=emitted)
        blocks = self.kv_cache.new_request("", len(prompt))
        return Request(core, prompt, order=self._num_requests, blocks=blocks, max_model_len=10**6)

    def compute(self, token_ids: Int32Array, num_prompt_tokens: int | None = None, **limits: int) -> Request:
        """A request that is admitted, and computed in one step, which begins a save of its new blocks."""
        request = self.request(token_ids, num_prompt_tokens, **limits)
        blocks = request.blocks
        computed = self.kv_cache.get_computed_blocks(blocks, token_ids)
        assert self.kv_cache.allocate_slots(blocks, len(token_ids), computed) is not None
        self.kv_cache.commit(blocks, token_ids, len(token_ids))
        request.num_cached_tokens = len(computed[0]) * self.block_size
        self.transfers.note_committed(request, 0)
        self.transfers.end_step(1, 1, 0.0)
        return request

    def save(self, token_ids: Int32Array) -> None:
        """Afterwards the slab has the blocks of these tokens, and no request has them."""
        self.kv_cache.free(self.compute(token_ids).blocks)
        self.end("save", True)
        if self.pending("stored"):
            self.end("stored", (True, {}))

    def forget_arena(self) -> None:
        self.kv_cache.reset_prefix_cache([])

    def begin(self, request: Request) -> bool:
        return self.transfers.begin(request, request.num_tokens - 1)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def pending(self, action: str) -> list[tuple[Any, ...]]:
        """The arguments of such calls that have not ended."""
        return [call.args for call in self.calls if call.action == action]

    def take(self, action: str) -> Call:
        call = next(call for call in self.calls if call.action == action)
        self.calls.remove(call)
        return call

    def end(self, action: str, *answers: Any) -> None:
        """End the oldest such call; `answers` are those of the ranks."""
        self.take(action).future.set_result(list(answers))
        self.transfers.settle()

    def end_fetch(self) -> list[bool]:
        """One rank answers with what the tiers have."""
        keys, _, ends = self.pending("fetch")[0]
        found, is_over = [], False
        for key, is_end in zip(keys, ends, strict=True):
            found.append(key in self.tiers and not is_over)
            is_over |= is_end and not found[-1]
        self.end("fetch", (found, {"fs": {"hits": float(sum(found))}}))
        return found

    def counts(self) -> TransferCounts:
        counts = self.transfers.take_counts()
        assert counts is not None
        return counts

    def check_idle(self) -> None:
        assert not self.calls and not self.transfers.is_running and not self.transfers.is_busy
        self.transfers.check_integrity()
        self.kv_cache.check_integrity([], self.transfers.held_blocks)


class Clock:
    """In place of `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(kv_transfers, "time", made)
    return made


def tokens(count: int, first: int = 0) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


# -- from the slab -----------------------------------------------------------------------------------------------------


def test_only_the_blocks_that_the_arena_lacks_are_loaded() -> None:
    """A prompt of 775 tokens, of which the arena has 704: 4 blocks of 16 are copied, because the last 7 tokens fill none."""
    bench = Bench(block_size=16, num_blocks=200, num_slots=100)
    prompt = tokens(775)
    bench.save(prompt)
    bench.forget_arena()
    bench.kv_cache.free(bench.compute(prompt[:704]).blocks)
    assert not bench.calls  # the slab has these blocks
    bench.counts()
    request = bench.request(prompt)
    assert bench.begin(request) and bench.transfers.awaits(request)
    ((slots, blocks),) = bench.pending("load")
    assert len(slots) == len(blocks) == 4
    assert sum(bench.transfers.held_blocks.values()) == 48
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
        bench.transfers.reset(with_slab=False)
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
    assert not {*rest} & {*blocks, *bench.transfers.held_blocks.elements()} and len(rest) == 10
    assert bench.transfers._slab.count_free(slots) == 0
    bench.pool.free(rest)
    bench.end("load", True)
    bench.check_idle()


# -- from the tiers ----------------------------------------------------------------------------------------------------


def with_tiers(bench: Bench, token_ids: Int32Array) -> list[bytes]:
    """The tiers, and nothing else, have these blocks afterwards. Returns their keys there."""
    bench.kv_cache.free(bench.compute(token_ids).blocks)
    keys = list(bench.pending("save")[0][3])
    bench.tiers.update(keys)
    bench.end("save", True)
    bench.end("stored", (True, {}))
    bench.forget_arena()
    bench.transfers.reset(with_slab=True)
    return keys


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


# -- how long a request waits ------------------------------------------------------------------------------------------


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
    bench.transfers._token_seconds, bench.transfers._block_seconds = compute / 32, fetch / 8
    request = bench.request(tokens(33))
    assert bench.begin(request)
    clock.now += wait - 0.001
    bench.transfers.settle()
    assert bench.transfers.awaits(request)
    clock.now += 0.002
    bench.transfers.settle()
    assert not bench.transfers.awaits(request)


def test_the_slab_is_waited_for_even_if_the_tiers_are_not_worth_it(clock: Clock) -> None:
    """Of 4 blocks the slab has 2. After their load the request waits for the tiers, but not as long as computing would take."""
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(17))
    bench.save(tokens(9))
    bench.forget_arena()
    bench.transfers._token_seconds, bench.transfers._block_seconds = 0.1, 0.1
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
    bench.transfers._token_seconds, bench.transfers._block_seconds = 0.01, 1.0

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
    bench.transfers._token_seconds, bench.transfers._block_seconds = 0.01, 0.1
    for _ in range(3):  # tries in which the tier takes no time
        assert not bench.begin(bench.request(tokens(9)))
        bench.end_fetch()
        bench.transfers.reset(with_slab=True)
        clock.now += kv_transfers.PROBE_SECONDS
    assert bench.transfers._block_seconds < 0.04
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
    assert sizes == [2, 3, 8, 1] and bench.transfers._block_seconds == pytest.approx(0.1)


def test_after_a_reset_a_fetch_ends(clock: Clock) -> None:
    bench = Bench(num_blocks=100, num_slots=100, tiers=(TIER,))
    with_tiers(bench, tokens(49))
    request = bench.request(tokens(49))
    assert bench.begin(request)
    bench.end_fetch()
    bench.kv_cache.reset_prefix_cache([])
    bench.transfers.reset(with_slab=True)
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
    seconds = {"save": counts.save_seconds, "load": counts.load_seconds, "fetch": 2 * bench.transfers._block_seconds}
    assert seconds[action] == pytest.approx(0.5)


def test_only_steps_of_prompts_tell_how_fast_tokens_are_computed() -> None:
    transfers = Bench().transfers
    transfers.end_step(8, 8, 0.5)  # decodes
    transfers.end_step(800, 8, 0.0)  # not measured
    assert transfers._token_seconds == 0.0
    transfers.end_step(800, 8, 0.8)
    assert transfers._token_seconds == pytest.approx(0.001)
    transfers.end_step(800, 8, 1.6)
    assert transfers._token_seconds == pytest.approx(0.001 + kv_transfers.SMOOTHING * 0.001)


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
    assert bench.transfers._slab.cached_keys() == []
    counts = bench.counts()
    assert (counts.num_failed, counts.num_saved_blocks) == (1, 0)
    bench.check_idle()


def test_slots_are_held_until_they_are_stored() -> None:
    bench = Bench(tiers=(TIER,))
    bench.kv_cache.free(bench.compute(tokens(17)).blocks)
    number, _, slots, keys = bench.pending("save")[0]
    assert len(set(keys)) == 4
    bench.end("save", True)
    assert bench.pending("stored") == [(number,)]
    assert bench.transfers._slab.count_free(slots) == 0 and not +bench.transfers.held_blocks
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
    bench.transfers.note_committed(second, 0)
    bench.transfers.end_step(1, 1, 0.0)
    assert len(bench.pending("save")) == 1  # while the save runs
    bench.end("save", True)
    bench.transfers.note_committed(second, 0)
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
        bench.transfers.reset(with_slab=True)
    bench.check_idle()


@pytest.mark.parametrize("is_limited", [True, False])
def test_blocks_that_a_request_finds_in_the_arena_are_saved_for_it(is_limited: bool) -> None:
    """Another request has computed them, for which they were not saved. Otherwise the slab would have later blocks only."""
    bench = Bench(offload_prompt_only=not is_limited)
    limits = {"max_offload_tokens": 4} if is_limited else {}
    bench.kv_cache.free(bench.compute(tokens(21), None if is_limited else 6, **limits).blocks)
    bench.end("save", True)
    for num_new in (4 + 4, 0):  # the second time the slab has all
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
        slab = bench.transfers._slab
        assert isinstance(slab, ArcPool)
        assert [len(each) for each in slab._arc.lists] == [2 - num_again, num_again]
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


@pytest.mark.parametrize("with_slab", [False, True])
def test_a_reset_while_blocks_are_saved(with_slab: bool) -> None:
    """They have been computed before it, and nobody may find them after it."""
    bench = Bench()
    bench.kv_cache.free(bench.compute(tokens(17)).blocks)
    bench.forget_arena()
    bench.transfers.reset(with_slab=with_slab)
    bench.end("save", True)
    assert bench.transfers._slab.cached_keys() == []
    assert not bench.begin(bench.request(tokens(17)))
    bench.check_idle()


def test_a_reset_before_committed_blocks_are_saved() -> None:
    bench = Bench()
    request = bench.request(tokens(17))
    assert bench.kv_cache.allocate_slots(request.blocks, 17) is not None
    bench.kv_cache.commit(request.blocks, tokens(17), 17)
    bench.transfers.note_committed(request, 0)
    bench.transfers.reset(with_slab=False)
    bench.transfers.end_step(1, 1, 0.0)
    assert not bench.calls


@pytest.mark.parametrize("with_slab", [False, True])
def test_a_reset_while_blocks_are_loaded(with_slab: bool) -> None:
    bench = Bench()
    bench.save(tokens(17))
    bench.forget_arena()
    request = bench.request(tokens(17))
    assert bench.begin(request)
    bench.forget_arena()
    bench.transfers.reset(with_slab=with_slab)
    bench.end("load", True)
    assert bench.brought == [request.request_id]
    assert bench.kv_cache.get_computed_blocks(request.blocks, tokens(17)) == ([],)
    assert bench.begin(bench.request(tokens(17))) == (not with_slab)
    if not with_slab:
        bench.end("load", True)
    bench.check_idle()


def test_a_reset_while_blocks_are_fetched() -> None:
    bench = Bench(tiers=(TIER,))
    with_tiers(bench, tokens(9))
    request = bench.request(tokens(9))
    assert bench.begin(request)
    bench.transfers.reset(with_slab=True)
    bench.end_fetch()
    assert bench.brought == [request.request_id]
    assert bench.transfers._slab.cached_keys() == []
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


@pytest.mark.parametrize(("group", "is_whole"), [(0, True), (1, False)])
def test_a_missing_block_of_a_window_does_not_end_a_fetch(group: int, is_whole: bool) -> None:
    bench = Bench(windows=(None, 5), num_blocks=100, num_slots=100, tiers=(TIER,))
    keys = with_tiers(bench, tokens(41))
    bench.tiers -= {keys[2 * 4 + group]}  # of block 4
    request = bench.request(tokens(41))
    assert bench.begin(request)
    while bench.pending("fetch"):
        bench.end_fetch()
    ((_, blocks),) = bench.pending("load")
    assert len(blocks) == (4 if is_whole else 10) + 1
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
    bench.transfers.note_committed(session, session.blocks.num_committed - 1)
    bench.transfers.end_step(1, 1, 0.0)
    bench.kv_cache.free(session.blocks)
    while bench.pending("save"):
        bench.tiers.update(bench.pending("save")[0][3])
        bench.end("save", True)
        bench.end("stored", (True, {}))
    (state,) = [key for key in bench.tiers if key[-2:] == b"\1\0" and key.startswith(session.blocks.hashes[5])]
    bench.tiers -= set() if has_state else {state}
    bench.forget_arena()
    bench.transfers.reset(with_slab=True)
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
