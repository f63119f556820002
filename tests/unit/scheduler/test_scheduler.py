"""The scheduler over a mock worker that checks every block it is shown. `MockEngine` compares the tokens as they come."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inflight.errors import EngineError, StepError
from inflight.fair_queue import FairQueue
from inflight.interface.request import MAX_FAULTS, FinishReason
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.scheduler.request import NO_SLOT, Request
from inflight.structured_output.backend import CompiledGrammar
from inflight.structured_output.spec import GrammarSpec
from tests.support.mock_engine import MAX_MODEL_LEN, VOCAB_SIZE, MockEngine
from tests.support.mock_worker import mock_generate
from tests.support.toy_grammar import ToyBackend


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No grammar is compiled before the event is set."""
    released, compile_toy = threading.Event(), ToyBackend._compile

    def compile_late(self: ToyBackend, spec: GrammarSpec) -> CompiledGrammar:
        assert released.wait(300)
        return compile_toy(self, spec)

    monkeypatch.setattr(ToyBackend, "_compile", compile_late)
    yield released
    released.set()


def num_calls(function: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called in it. The least of three times: a collection of garbage, too, calls
    functions."""
    counts: list[int] = []

    def note(_frame: object, event: str, _argument: object) -> None:
        counts[-1] += event in ("call", "c_call")

    for _ in range(3):
        counts.append(0)
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return min(counts)


def test_preemption_happens_and_loses_nothing() -> None:
    engine = MockEngine(extra_blocks=0, max_num_seqs=4, max_num_batched_tokens=8, caching=False)
    for i in range(4):
        engine.add(f"r{i}", [i] * 20, 40)
    while engine.core.has_unfinished_requests():
        num_preemptions = engine.scheduler.stats.num_preemptions
        engine.step()
        if engine.scheduler.stats.num_preemptions > num_preemptions:  # none takes the blocks that were made free
            assert engine.executor.plans[-1].new_requests == ()
    engine.run()
    assert engine.scheduler.stats.num_preemptions > 0
    assert engine.order[0] == "r0"  # the first to come is never the victim


def test_the_smallest_cache_holds_a_sequence_of_full_length() -> None:
    for windows in ((None,), (8,), (None, 8)):
        engine = MockEngine(windows=windows, extra_blocks=0, max_num_seqs=1, max_num_batched_tokens=MAX_MODEL_LEN)
        engine.add("a", [1] * (MAX_MODEL_LEN - 4), 4)
        engine.run()
        assert engine.scheduler.stats.num_preemptions == 0


def test_a_long_prompt_delays_no_running_request() -> None:
    engine = MockEngine(max_num_batched_tokens=8, caching=False)
    engine.add("first", [1] * 4, 30)
    engine.step()
    engine.add("long", [2] * 60, 2)
    engine.add("short", [3] * 4, 2)
    for _ in range(5):
        before = len(engine.outputs["first"])
        engine.step()
        assert len(engine.outputs["first"]) == before + 1


@pytest.mark.parametrize("depth", [1, 3])
def test_children_compute_the_shared_prompt_once(depth: int) -> None:
    prompt = [1] * 30
    for caching in (False, True):
        engine = MockEngine(caching=caching, extra_blocks=60, depth=depth)
        for child in range(4):
            engine.add(f"c{child}", prompt, 2, leader="c0" if child else None)
        engine.run()
        # the children wait until the leader's step is planned, and not until it is committed
        assert [plan.request_ids for plan in engine.executor.plans[:2]] == [("c0",), ("c0", "c1", "c2", "c3")]
        # the leader computes 30, each child the last two (28 are in 7 full blocks), and one decode step each
        assert engine.worker.num_computed_tokens == 30 + 3 * 2 + 4


def test_children_wait_for_the_last_chunk_of_the_shared_prompt() -> None:
    engine = MockEngine(caching=False, max_num_batched_tokens=8)
    for child in range(3):
        engine.add(f"c{child}", [1] * 30, 2, leader="c0" if child else None)
    engine.run()
    assert [plan.request_ids for plan in engine.executor.plans[:4]] == [("c0",)] * 4
    assert engine.worker.num_computed_tokens == 30 + 2 * 2 + 3


def test_prefix_cache_saves_all_but_the_last_block_and_respects_the_salt() -> None:
    engine = MockEngine()
    engine.add("a", [1] * 33, 1)
    engine.run()
    before = engine.worker.num_computed_tokens
    engine.add("b", [1] * 33, 1)
    engine.run()
    assert engine.worker.num_computed_tokens - before == 1  # 32 tokens are 8 full blocks
    before = engine.worker.num_computed_tokens
    engine.add("c", [1] * 33, 1, salt="other user")
    engine.run()
    assert engine.worker.num_computed_tokens - before == 33


def test_a_request_that_runs_alone_and_out_of_blocks_is_admitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused drafts can leave a block of states that the request cannot use. Admitted again, it needs fewer."""
    engine = MockEngine()
    scheduler = engine.scheduler
    allocate = scheduler._kv_cache.allocate_slots

    def are_too_few(blocks: RequestBlocks, num_tokens: int, *computed: Any) -> int | None:
        if num_tokens > 14 and blocks.tables[0] and not scheduler.stats.num_preemptions:
            return None
        return allocate(blocks, num_tokens, *computed)

    monkeypatch.setattr(scheduler._kv_cache, "allocate_slots", are_too_few)
    engine.add("a", [1] * 9, 20)
    engine.run()
    assert scheduler.stats.num_preemptions == 1 and engine.finished["a"] is FinishReason.LENGTH


def test_what_is_committed_is_told_to_the_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first block on when it is committed first: of what was found in the cache nobody knows whether it was saved."""
    engine, told = MockEngine(), list[tuple[int, int]]()

    def note(request: Request, first: int) -> None:
        told.append((first, request.blocks.num_committed))

    monkeypatch.setattr(engine.scheduler.transfers, "record_committed", note)
    for name, num_committed in (("a", 4), ("b", 5)):
        engine.add(name, [1] * (4 * num_committed + 1), 8)
        engine.run()
        assert told == [(0, num_committed), (num_committed, num_committed + 1), (num_committed + 1, num_committed + 2)]
        told.clear()
    assert engine.cached_tokens["b"] == 16


def test_what_is_computed_on_top_of_a_cache_that_was_reset_is_not_found() -> None:
    engine = MockEngine()
    engine.add("running", [1] * 20, 30)
    engine.step()
    engine.core.reset_prefix_cache()
    engine.run()
    tokens = [1] * 20 + engine.outputs["running"]
    # "first" computes the beginning anew; behind it nothing is found but what was computed after the reset
    for name, length, num_cached in (("first", 21, 0), ("second", 45, 20), ("third", 45, 44)):
        engine.add(name, tokens[:length], 1)
        engine.run()
        assert engine.cached_tokens[name] == num_cached


def test_a_sliding_window_frees_the_blocks_that_leave_it() -> None:
    engine = MockEngine(windows=(8,), caching=False, max_num_batched_tokens=8)
    engine.add("a", [1] * 40, 20)
    held = []
    while engine.core.has_unfinished_requests():
        engine.step()
        held.append(engine.pool.num_blocks - 1 - engine.pool.num_free_blocks)
    assert max(held) <= (8 + 8) // 4 + 2  # window and step, not 15 blocks


def test_priority_comes_before_arrival() -> None:
    engine = MockEngine(max_num_seqs=1, policy="priority")
    for name, priority in (("low", 5), ("high", -1), ("middle", 2)):
        engine.add(name, [1, 2, 3], 2, priority=priority)
    engine.run()
    assert engine.order == ["high", "middle", "low"]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_length_and_context_limit_end_a_request(max_tokens: int) -> None:
    engine = MockEngine()
    engine.add("a", [1] * 3, max_tokens)
    engine.add("b", [2] * 60, 100)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert len(engine.outputs["a"]) == max_tokens
    assert len(engine.outputs["b"]) == MAX_MODEL_LEN - 60


def test_an_abort_while_the_step_is_in_flight_is_passed_over_at_commit() -> None:
    engine = MockEngine(depth=2)
    engine.add("a", [1] * 10, 5)
    engine.add("b", [2] * 10, 5)
    assert [output.request_id for output in engine.step()] == ["a", "b"]
    engine.abort("a")
    assert [output.request_id for output in engine.step()] == ["b"]
    engine.run()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_row_from_which_nothing_can_be_drawn_fails_alone(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MockEngine(depth=depth)
    engine.add("a", [1] * 10, 5)
    engine.add("b", [2] * 10, 5)
    execute_model = engine.worker.execute_model

    def draws_nothing_in_step_0(plan: SchedulerOutput) -> ModelRunnerOutput:
        output = execute_model(plan)
        output.sampled_token_ids[0] = -1 if plan.step_id == 0 else output.sampled_token_ids[0]
        return output

    monkeypatch.setattr(engine.worker, "execute_model", draws_nothing_in_step_0)
    first, _ = engine.step()
    assert (first.request_id, first.finish_reason, first.new_token_ids) == ("a", FinishReason.ERROR, ())
    assert "no token could be drawn" in first.error and first.error_kind == "engine"
    engine.run()
    assert engine.finished["b"] is FinishReason.LENGTH


@pytest.mark.parametrize(
    "num_losses", [0, MAX_FAULTS]
)  # the grammar of a quarantined request is compiled when it may run
def test_a_request_whose_grammar_finds_no_place_in_the_queue_ends(
    num_losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FairQueue, "is_full_for", lambda *_: True)
    engine = MockEngine()
    engine.add("a", [1] * 10, 5, grammar="3", num_losses=num_losses)
    engine.add("b", [2] * 10, 5)
    outputs = engine.step() + engine.step()
    [refused] = [each for each in outputs if each.request_id == "a"]
    assert (refused.finish_reason, refused.error_kind) == (FinishReason.ERROR, "overload")
    assert "too many grammars wait" in refused.error
    engine.run()
    assert engine.finished["b"] is FinishReason.LENGTH and engine.scheduler.quarantine.alone is None


def test_the_grammar_of_an_aborted_request_is_deferred_no_longer() -> None:
    engine = MockEngine()
    engine.add("quarantined", [1] * 10, 5, num_losses=MAX_FAULTS)
    engine.add("a", [2] * 10, 5, grammar="3")
    quarantine = engine.scheduler.quarantine
    assert [request.request_id for request in quarantine.deferred] == ["a"]
    engine.abort("a")
    assert quarantine.deferred == []
    engine.run()
    assert engine.finished["quarantined"] is FinishReason.LENGTH


def test_a_plan_does_not_look_at_those_that_wait_for_their_grammars(compiling: threading.Event) -> None:
    engine = MockEngine()
    for i in range(300):
        engine.add(f"r{i}", [1] * 9, 2, grammar=str(i))
    assert engine.scheduler.schedule() is None
    assert num_calls(engine.scheduler.schedule) < 30
    assert (engine.scheduler.num_waiting, engine.scheduler.num_waiting_tokens) == (300, 2700)
    engine.add("plain", [2] * 9, 3)
    assert [output.request_id for output in engine.step()] == ["plain"]
    for i in range(290):
        engine.abort(f"r{i}")
    assert (engine.scheduler.num_waiting, engine.scheduler.num_waiting_tokens) == (10, 90)
    compiling.set()
    engine.run()
    assert engine.order[0] == "plain"


def test_a_plan_does_not_look_at_those_that_wait_for_their_leader(compiling: threading.Event) -> None:
    engine = MockEngine()
    for child in range(100):
        engine.add(f"c{child}", [1] * 9, 2, leader="c0" if child else None, grammar=None if child else "3")
    engine.scheduler.schedule()
    assert num_calls(engine.scheduler.schedule) < 30
    engine.abort("c7")
    engine.add("plain", [2] * 9, 3)
    assert [output.request_id for output in engine.step()] == ["plain"]
    engine.abort("c0")  # none waits for a leader that is gone
    compiling.set()
    engine.run()
    assert [name for name in engine.order if name != "plain"] == [f"c{i}" for i in range(1, 100) if i != 7]


def test_what_was_held_takes_its_place_in_the_queue_again(compiling: threading.Event) -> None:
    """Its place is that of its priority and its arrival, not of when its grammar came."""
    engine = MockEngine(max_num_seqs=1, policy="priority")
    engine.add("running", [1] * 5, 4)
    engine.step()
    for name, priority, grammar in (("late", 1, "3"), ("later", 1, None), ("first", 0, "4"), ("last", 2, None)):
        engine.add(name, [2] * 5, 2, priority=priority, grammar=grammar)
    engine.step()
    compiling.set()
    engine.scheduler.wait_for_grammars()
    engine.run()
    assert engine.order == ["running", "first", "late", "later", "last"]


def test_a_request_that_does_not_fit_is_not_overtaken_by_one_that_would() -> None:
    engine = MockEngine(extra_blocks=0, caching=False)
    engine.add("running", [1] * 20, 20)
    engine.step()
    engine.add("large", [2] * 48, 2)  # 12 blocks of the 16, of which the first has 6 at least
    engine.add("small", [3] * 4, 2)
    while not engine.outputs["large"]:
        assert not engine.outputs["small"]
        engine.step()
    engine.run()


def test_equal_requests_share_the_budget_whoever_was_preempted() -> None:
    """Twice as many as there are slots and blocks for: they end in the order in which they came, each once."""
    engine = MockEngine(extra_blocks=8, max_num_seqs=6, max_num_batched_tokens=12, caching=False)
    for i in range(12):
        engine.add(f"r{i}", [i] * 16, 24)
    engine.run()
    assert engine.scheduler.stats.num_preemptions > 0
    assert engine.order == [f"r{i}" for i in range(12)]


def test_what_is_told_of_the_start_stays_over_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed request finds its own blocks in the prefix cache: these are not tokens that its user was spared."""
    clock = itertools.count(100)
    monkeypatch.setattr("inflight.scheduler.step_scheduler.time.monotonic", lambda: float(next(clock)))
    engine = MockEngine()
    engine.add("a", [1] * 20, 12)
    (first,) = engine.step()
    waited = first.queue_seconds
    assert (waited > 0, first.num_cached_tokens) == (True, 0)
    request = engine.scheduler._requests["a"]
    engine.scheduler._requeue(request)
    num_hits = engine.scheduler.stats.num_hit_tokens
    (again,) = engine.step()
    assert engine.scheduler.stats.num_hit_tokens - num_hits == 20
    assert (again.queue_seconds, again.num_cached_tokens) == (waited, 0)
    engine.run()


def test_an_abort_takes_back_a_failure_that_nobody_was_told(compiling: threading.Event) -> None:
    engine = MockEngine()
    engine.add("bad", [1] * 5, 3, grammar="bad")
    engine.add("other", [1] * 5, 3, grammar="bad")
    compiling.set()
    engine.scheduler.wait_for_grammars()
    assert engine.scheduler.schedule() is None
    assert engine.scheduler.has_failures
    engine.abort("bad")
    [output] = engine.step()
    assert (output.request_id, output.error_param) == ("other", "regex")
    assert not engine.scheduler.has_unfinished_requests()
    engine.run()


# -- steps in flight -----------------------------------------------------------------------------------------------------


def test_the_end_is_never_planned_past() -> None:
    engine = MockEngine(depth=4, max_num_batched_tokens=100)
    engine.add("a", [1] * 10, 3)
    engine.add("b", [2] * 62, 100)
    assert len(engine.step()) == 2
    # a: the prompt, two of its three tokens; b: the prompt, one of its two tokens
    assert [plan.num_scheduled_tokens.tolist() for plan in engine.executor.plans] == [[10, 62], [1, 1], [1]]
    engine.run()
    assert len(engine.executor.plans) == 3


def test_a_stop_seen_late_leaves_no_trace() -> None:
    engine = MockEngine(depth=3, max_num_seqs=1)
    prompt = [1] * 10
    tokens = mock_generate(prompt, 4, VOCAB_SIZE)
    engine.add("a", prompt, 20, stop=frozenset({tokens[1]}))
    engine.add("b", [2] * 30, 3)
    engine.step()
    engine.step()
    assert (engine.finished, engine.outputs["a"]) == ({"a": FinishReason.STOP}, tokens[:2])
    # two steps of it are in flight, and all it had is free: the next plan gives its slot and blocks to another
    assert [plan.request_ids for plan in engine.executor.plans] == [*[("a",)] * 4, ("b",)]
    assert engine.pool.num_free_blocks == engine.pool.num_blocks - 1 - 30 // engine.block_size - 1
    assert engine.step() == []
    engine.run()


def test_a_request_preempted_with_steps_in_flight_keeps_their_tokens() -> None:
    engine = MockEngine(depth=3, extra_blocks=0, caching=False)
    for i in range(4):
        engine.add(f"r{i}", [i] * 20, 40)
    kept = 0
    while engine.core.has_unfinished_requests():
        waiting = {id_ for id_, request in engine.scheduler._requests.items() if request.slot == NO_SLOT}
        kept += sum(len(output.new_token_ids) for output in engine.step() if output.request_id in waiting)
    assert engine.scheduler.stats.num_preemptions > 0 and kept > 0
    # no stop was seen late, so every draw was kept: none was made twice
    num_draws = sum(int(plan.samples.sum()) for plan in engine.executor.plans)
    assert num_draws == sum(map(len, engine.outputs.values())) == 4 * 40


def test_a_preempted_request_resumes_after_its_steps_in_flight() -> None:
    engine = MockEngine(depth=4)
    for name in ("a", "b"):
        engine.add(name, [1] * 10, 20)
    engine.step()
    engine.scheduler._requeue(engine.scheduler._requests["b"])  # there are blocks enough to resume it at once
    engine.add("c", [2] * 10, 3)  # comes after b, and waits behind it
    for _ in range(3):
        engine.step()
        assert engine.scheduler.num_waiting == 2
    engine.step()
    resumed, late = engine.executor.plans[-1].new_requests
    assert (resumed.request_id, len(resumed.token_ids), late.request_id) == ("b", 15, "c")
    engine.run()


def test_a_window_on_the_move_gives_blocks_back_before_its_request_is_preempted() -> None:
    engine = MockEngine(depth=3, windows=(4,), extra_blocks=0, max_num_batched_tokens=8, caching=False)
    engine.add("a", [1] * 60, 4)
    engine.run()
    assert engine.scheduler.stats.num_preemptions == 0
    assert len(engine.executor.plans) == 11


def test_blocks_get_their_names_at_commit() -> None:
    engine = MockEngine(depth=3, max_num_batched_tokens=16)
    engine.add("a", [1] * 60, 4)
    engine.step()
    assert len(engine.executor.plans) == 4 and len(engine.pool._index) == 16 // engine.block_size
    engine.run()


def test_a_staggered_request_waits_and_steps_are_balanced() -> None:
    engine = MockEngine(depth=4, stagger=3, max_num_seqs=8, extra_blocks=200)
    for i in range(7):
        engine.add(f"r{i}", [i] * 4, 40)
    for _ in range(30):
        engine.step()
    sizes = [len(plan.request_ids) for plan in engine.executor.plans]
    assert sizes[0] == 7  # the prompts
    assert set(sizes[1:]) == {3, 1} and max(map(sum, zip(sizes[1:], sizes[2:], sizes[3:], strict=False))) == 7
    engine.add("long", [9] * 60, 2)
    num_plans = len(engine.executor.plans)
    engine.run()
    plans = [plan for plan in engine.executor.plans[num_plans:] if "long" in plan.request_ids]
    # its 60 tokens fill the budget of 64 that two steps of decodes leave, one right after the other; then it is staggered
    assert [plan.step_id - num_plans for plan in plans] == [0, 5]


def test_a_single_request_is_not_kept_waiting_by_the_stagger() -> None:
    engine = MockEngine(depth=4, stagger=3)
    engine.add("a", [1] * 10, 5)
    for _ in range(5):
        assert len(engine.step()) == 1
    assert len(engine.executor.plans) == 5


def test_prompt_chunks_are_planned_in_consecutive_steps() -> None:
    engine = MockEngine(depth=4, stagger=3, max_num_batched_tokens=16)
    engine.add("a", [1] * 40, 2)
    engine.step()
    assert [plan.num_scheduled_tokens.tolist() for plan in engine.executor.plans] == [[16], [16], [8]]
    engine.run()


@pytest.mark.parametrize("keeps_its_tokens", [False, True])
def test_a_failed_step_voids_the_younger_ones(keeps_its_tokens: bool) -> None:
    engine = MockEngine(depth=3)
    engine.add("a", [1] * 10, 8)
    engine.add("b", [2] * 10, 8)
    engine.step()
    engine.executor.failing[1] = keeps_its_tokens
    with pytest.raises(StepError, match="injected") as caught:
        engine.step()
    assert caught.value.step_id == 1
    assert engine.scheduler.num_running == 0 and engine.core._in_flight == deque()
    engine.step()
    assert [len(data.token_ids) for data in engine.executor.plans[4].new_requests] == [11, 11]  # in full, as emitted
    assert engine.scheduler.stats.num_preemptions == 0  # nobody lost blocks to others
    engine.run()


def test_blocks_that_nobody_gives_back_are_an_error_and_no_endless_wait() -> None:
    engine = MockEngine(extra_blocks=0, max_num_seqs=1)
    lost = engine.pool.allocate(engine.pool.num_free_blocks)
    engine.add("a", [1] * 5, 3)
    with pytest.raises(EngineError, match="none of 1 requests can be scheduled"):
        engine.scheduler.schedule()
    engine.pool.free(lost)
    engine.run()
