"""`Gates`: who may be admitted next, and who is held until which event."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.config.engine import SchedulerConfig
from inflight.errors import EngineError
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.request import MAX_FAULTS, EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.manager import KVCacheManager
from inflight.sampling_params import SamplingParams
from inflight.scheduler.gates import Gates
from inflight.scheduler.no_transfers import NoTransfers
from inflight.scheduler.prompt_sharing import PromptSharing
from inflight.scheduler.quarantine import Quarantine
from inflight.scheduler.request import Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue
from inflight.scheduler.step_time.limits import StepLimits

SIZE = 4
LONG = 20
SAMPLING = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=9)


class SomeTransfers(NoTransfers):
    """The requests in `wanted` must wait. `asked`: each request that was asked for, and the first token that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: set[str] = set()
        self.asked: list[tuple[str, int]] = []

    def begin(self, request: Request, last: int) -> bool:
        self.asked.append((request.request_id, last))
        request.blocks.were_sought = True
        return request.request_id in self.wanted


class Waiting:
    """The gates, with what they look at."""

    def __init__(self) -> None:
        spec = KVCacheSpec(block_size=SIZE, num_kv_heads=1, head_dim=1, dtype="float32", itemsize=4)
        groups = (KVCacheGroup(layer_names=("layers.0",), spec=spec),)
        cache = KVCacheConfig(num_blocks=40, block_bytes=64, groups=groups)
        self.kv_cache = KVCacheManager(cache, fingerprint="m", enable_prefix_caching=True)
        self.requests: dict[str, Request] = {}
        self.queue, self.in_flight = RequestQueue("fcfs"), list[Any]()
        self.quarantine = Quarantine(self.in_flight)
        config = SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            enable_chunked_prefill=True,
            policy="fcfs",
            depth=1,
            stagger=1,
            long_prefill_token_threshold=LONG,
        )
        limits, sharing = StepLimits(config, SIZE, None), PromptSharing(self.requests, self.kv_cache)
        self.transfers = SomeTransfers()
        self.gates = Gates(self.queue, sharing, self.quarantine, limits, self.transfers)

    def add(
        self, name: str, num_tokens: int = 6, *, leader: str | None = None, is_long: bool = False, **core: Any
    ) -> Request:
        request = Request(
            EngineCoreRequest(request_id=name, sampling=SAMPLING, prompt_leader=leader, **core),
            np.arange(num_tokens, dtype=np.int32),
            order=len(self.requests),
            blocks=self.kv_cache.new_request("", num_tokens),
            max_model_len=1000,
        )
        request.is_long = is_long
        self.requests[name] = request
        self.quarantine.add(request)
        self.queue.push(request)
        return request

    def next(self, *, may_start_long: bool = True) -> str | None:
        request = self.gates.next_request(may_start_long=may_start_long)
        return None if request is None else request.request_id

    def admit(self, name: str) -> None:
        request = self.requests[name]
        assert self.next() == name
        self.queue.pop(request)
        request.status = RequestStatus.RUNNING

    def check(self, *, is_compiling: bool = False) -> None:
        self.gates.check_progress(self.requests, self.in_flight, is_compiling=is_compiling)


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_without_a_reason_to_wait_the_first_is_next(waiting: Waiting) -> None:
    assert waiting.next() is None
    waiting.add("a")
    waiting.add("b")
    assert waiting.next() == "a"
    waiting.admit("a")
    assert waiting.next() == "b"


def test_a_request_is_held_until_its_blocks_are_there(waiting: Waiting) -> None:
    """Others overtake it meanwhile. Then it has its place in the order again, and is not asked for once more."""
    waiting.transfers.wanted = {"a"}
    held = waiting.add("a", 9)
    waiting.add("b")
    assert waiting.next() == "b"
    assert waiting.queue.is_deferred(held)
    waiting.gates.record_brought(held)
    assert waiting.next() == "a"
    waiting.admit("a")
    assert waiting.next() == "b"
    assert waiting.transfers.asked == [("a", 8), ("b", 5)]


def test_all_may_be_held(waiting: Waiting) -> None:
    waiting.transfers.wanted = {"a", "b"}
    waiting.add("a")
    waiting.add("b")
    assert waiting.next() is None
    assert (waiting.queue.num_deferred, len(waiting.queue)) == (2, 2)


def test_a_preempted_request_is_asked_for_again(waiting: Waiting) -> None:
    request = waiting.add("a")
    waiting.admit("a")
    request.append(7)
    request.status, request.blocks.were_sought = RequestStatus.PREEMPTED, False  # as `Scheduler._requeue` does
    waiting.queue.push(request)
    waiting.transfers.wanted = {"a"}
    assert waiting.next() is None
    assert waiting.transfers.asked == [("a", 5), ("a", 6)]


def test_a_preempted_request_in_flight_is_waited_for(waiting: Waiting) -> None:
    waiting.transfers.wanted = {"a"}
    request = waiting.add("a")
    request.num_in_flight = 1
    waiting.add("b")
    assert waiting.next() is None  # "b" would take its blocks
    assert waiting.transfers.asked == []


def test_a_follower_waits_for_its_leader_and_shares_its_blocks(waiting: Waiting) -> None:
    waiting.transfers.wanted = {"c0", "c1"}
    leader = waiting.add("c0", 9)
    follower = waiting.add("c1", 9, leader="c0")
    assert waiting.next() is None
    assert waiting.queue.is_deferred(leader) and waiting.queue.is_deferred(follower)
    waiting.gates.record_brought(leader)  # the name of its event is the followers', too
    assert waiting.next() == "c0"
    waiting.admit("c0")
    assert waiting.next() is None and waiting.queue.is_deferred(follower)
    leader.num_computed_tokens = 8
    waiting.queue.release("c0")
    assert waiting.next() == "c1"
    assert waiting.transfers.asked == [("c0", 8)]  # nothing is brought for "c1"


def test_a_follower_whose_leader_has_ended_is_asked_for(waiting: Waiting) -> None:
    waiting.add("c0", 9)
    waiting.add("c1", 9, leader="c0")
    waiting.admit("c0")
    del waiting.requests["c0"]
    waiting.transfers.wanted = {"c1"}
    assert waiting.next() is None
    assert waiting.transfers.asked == [("c0", 8), ("c1", 8)]


def test_only_the_quarantined_request_may_run(waiting: Waiting) -> None:
    """It runs without transfers, because one of them may be the cause."""
    waiting.transfers.wanted = {"a", "b"}
    waiting.add("a")
    quarantined = waiting.add("b", num_losses=MAX_FAULTS)
    assert waiting.quarantine.alone is quarantined
    waiting.in_flight.append(("a plan", [waiting.requests["a"]]))
    assert waiting.next() is None
    waiting.in_flight.clear()
    quarantined.num_in_flight = 1
    assert waiting.next() is None
    quarantined.num_in_flight = 0
    assert waiting.next() == "b"
    quarantined.status = RequestStatus.RUNNING
    assert waiting.next() is None
    assert waiting.transfers.asked == []


def test_a_quarantined_request_that_is_held_does_not_run(waiting: Waiting) -> None:
    waiting.transfers.wanted = {"a"}
    request = waiting.add("a")
    assert waiting.next() is None
    other = Waiting().add("b")
    for _ in range(MAX_FAULTS):
        waiting.quarantine.record_failed_step([request, other])
    assert waiting.quarantine.alone is request
    assert waiting.next() is None
    waiting.gates.record_brought(request)
    assert waiting.next() == "a"


def test_a_request_whose_cached_blocks_are_gone_is_long(waiting: Waiting) -> None:
    waiting.add("a", LONG + 1)
    waiting.add("b")
    assert waiting.next(may_start_long=False) == "b"
    assert waiting.requests["a"].is_long
    assert waiting.next() == "a"


def test_a_request_whose_blocks_were_brought_is_short_again(waiting: Waiting) -> None:
    waiting.transfers.wanted = {"a"}
    request = waiting.add("a", LONG + 1, is_long=True)
    assert waiting.next() is None
    pool = waiting.kv_cache.pool
    waiting.kv_cache.name_blocks(request.blocks, request.token_ids)
    blocks = pool.allocate(2)
    for block_id, name in zip(blocks, request.blocks.hashes, strict=False):
        pool.register(block_id, (name, 0))
    pool.free(blocks)
    waiting.gates.record_brought(request)
    assert not request.is_long
    assert waiting.next(may_start_long=False) == "a"


def test_nothing_to_do_is_a_defect_unless_something_is_awaited(waiting: Waiting) -> None:
    waiting.check()  # there are no requests
    waiting.transfers.wanted = {"a"}
    waiting.add("a")
    with pytest.raises(EngineError, match="none of 1 requests can be scheduled"):
        waiting.check()
    with pytest.raises(EngineError):
        waiting.check(is_compiling=True)  # another request's grammar: this one is free to run
    waiting.in_flight.append(("a plan", []))
    waiting.check()
    waiting.in_flight.clear()
    waiting.transfers.is_running = True
    waiting.check()
    waiting.transfers.is_running = False
    assert waiting.next() is None  # it is held
    with pytest.raises(EngineError):
        waiting.check()
    waiting.check(is_compiling=True)


def test_a_gate_that_was_added_is_asked_last_and_holds_until_its_event(waiting: Waiting) -> None:
    """While all are held by it, nothing to do is no defect: its event will come."""
    asked: list[str] = []
    closed = {"a", "c"}

    def may_start(request: Request) -> str | None:
        asked.append(request.request_id)
        return "opened" if request.request_id in closed else None

    waiting.gates.gates.append(may_start)
    waiting.transfers.wanted = {"b"}
    a = waiting.add("a")
    waiting.add("b")
    waiting.add("c")
    assert waiting.gates.next_request(may_start_long=True) is None
    assert asked == ["a", "c"], "b waits for its blocks"
    waiting.gates.check_progress(waiting.requests, [], is_compiling=False)
    closed.clear()
    waiting.gates.release("opened")
    assert waiting.gates.next_request(may_start_long=True) is a
    with pytest.raises(EngineError):
        waiting.gates.check_progress(waiting.requests, [], is_compiling=False)
