"""The scheduler over random schedules, and over requests that make their steps fail: tokens, counters and step ids are right.

`MockEngine` checks each plan, each token and all states as they come.
"""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inflight.errors import StepError
from inflight.interface.codec import encode
from inflight.interface.messages import ExecuteModel
from inflight.interface.request import MAX_FAULTS, EngineCoreRequest, FinishReason, ResolvedSampling
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.block_hash import BlockHasher
from inflight.sampling_params import SamplingParams
from inflight.scheduler.scheduler import Scheduler
from tests.support.erratic_times import ErraticTimes
from tests.support.mock_engine import MAX_MODEL_LEN, MockEngine


def some_engine(rng: random.Random) -> MockEngine:
    chunked = rng.random() < 0.7
    max_num_seqs = rng.randint(1, 5)
    engine = MockEngine(
        block_size=rng.choice([1, 2, 4]),
        windows=tuple(rng.choices([None, 1, 3, 7], k=rng.randint(1, 2))),
        extra_blocks=rng.choice([0, 3, 40]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 24) if chunked else MAX_MODEL_LEN,
        chunked=chunked,
        caching=rng.random() < 0.6,
        policy=rng.choice(["fcfs", "priority"]),
        depth=rng.randint(1, 4),
        stagger=rng.randint(1, 2),
        num_speculative_tokens=rng.choice([0, 0, 3]),
        fault_tolerance=True,
    )
    if chunked and rng.random() < 0.5:
        engine.limit_times(
            ErraticTimes(seed=0),
            target_seconds=0.01,
            max_step_seconds=1.0,
            max_num_partial_prefills=rng.randint(1, 3),
            long_prefill_token_threshold=8,
        )
    return engine


def some_event(rng: random.Random, engine: MockEngine, number: int) -> None:
    name, prompt = f"r{number}", [rng.randrange(3)] * rng.randint(1, 20) + [rng.randrange(4) for _ in range(5)]
    stop = frozenset(range(10)) if rng.random() < 0.3 else frozenset[int]()
    kind = rng.random()
    if kind < 0.15:
        engine.add(name, prompt, rng.randint(1, 20), stop=stop, priority=rng.randrange(3))
    elif kind < 0.2:
        engine.add(name, prompt, rng.randint(1, 20), prompt_logprobs=True, num_losses=rng.choice([0, 0, MAX_FAULTS]))
    elif kind < 0.3:
        engine.add(name, prompt, rng.randint(1, 20), grammar=str(10 * number + rng.randrange(10)))
    elif kind < 0.35:
        for child in range(3):
            engine.add(f"{name}c{child}", prompt, 4 + child, leader=f"{name}c0" if child else None)
    elif kind < 0.4 and engine.scheduler.num_running:
        engine.scheduler._requeue(rng.choice(engine.scheduler._running))
        engine.scheduler.check_integrity()
    elif kind < 0.43 and engine.wanted:
        engine.abort(rng.choice(sorted(engine.wanted)))
    elif kind < 0.46:
        engine.executor.failing[engine.executor.next_step_id] = rng.random() < 0.5
    else:
        engine.step()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_tokens_and_the_counters_are_right(seed: int) -> None:
    for example in range(5):
        rng = random.Random(5 * seed + example)
        engine = some_engine(rng)
        for number in range(rng.randint(5, 40)):
            some_event(rng, engine, number)
        engine.run()
        plans, stats = engine.executor.plans, engine.scheduler.stats
        assert [plan.step_id for plan in plans] == list(range(len(plans)))
        assert not engine.scheduler.limits._in_flight  # of void steps, too, no prediction is kept
        num_told = sum(map(len, engine.outputs.values()))
        num_added = stats.num_sampled_tokens + stats.num_forced_tokens
        assert num_added == num_told if not engine.aborted else num_added >= num_told
        assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
        assert 0 <= stats.num_hit_tokens < max(1, stats.num_queried_tokens)


class Poison:
    """Every step that has one of these requests fails. `failed` are the requests of each failed step."""

    def __init__(self, engine: MockEngine, *request_ids: str) -> None:
        self.failed: list[tuple[str, ...]] = []
        run = engine.worker.execute_model

        def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
            if set(request_ids) & set(plan.request_ids):
                engine.worker.apply(plan)
                self.failed.append(tuple(plan.request_ids))
                raise StepError("poisoned", rank=0, step_id=plan.step_id)
            return run(plan)

        engine.worker.execute_model = execute  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 3])
def test_requests_that_fail_their_steps_end_alone_and_the_others_go_on(depth: int) -> None:
    engine = MockEngine(depth=depth, fault_tolerance=True)
    poison = Poison(engine, "bad", "worse")
    for i, name in enumerate(("a", "bad", "b", "worse")):
        engine.add(name, [i] * 9, 6)
    errors: dict[str, tuple[str, str]] = {}
    while engine.core.has_unfinished_requests():
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                errors[output.request_id] = output.error_kind, output.error
    engine.run()
    assert errors == dict.fromkeys(("bad", "worse"), ("engine", "the engine failed: poisoned"))
    assert [set(failed) for failed in poison.failed[:MAX_FAULTS]] == [{"a", "bad", "b", "worse"}] * MAX_FAULTS
    assert poison.failed[MAX_FAULTS:] == [("bad",), ("worse",)]  # each alone, once
    assert [engine.finished[name] for name in ("a", "b")] == [FinishReason.LENGTH] * 2
    alone = [plan.request_ids for plan in engine.executor.plans if plan.request_ids in (("a",), ("b",))]
    assert alone, "the innocent ones were in quarantine, too, and were cleared one after the other"
    assert engine.scheduler.quarantine.alone is None and engine.scheduler.quarantine._requests == []


def test_the_siblings_of_a_request_that_fails_its_steps_end_with_it() -> None:
    engine = MockEngine(fault_tolerance=True)
    poison = Poison(engine, "c0", "c1", "c2")
    for child in range(3):
        engine.add(f"c{child}", [1] * 9, 6, leader="c0" if child else None)
    engine.add("other", [2] * 9, 6)
    engine.run()
    assert [engine.finished[f"c{child}"] for child in range(3)] == [FinishReason.ERROR] * 3
    assert engine.finished["other"] is FinishReason.LENGTH
    assert len(poison.failed) == MAX_FAULTS + 1


def test_a_quarantined_request_that_arrives_runs_before_all_others() -> None:
    """It was in flight when engine cores were lost, so it must not share a step with other requests."""
    engine = MockEngine(depth=2)
    engine.add("a", [1] * 9, 12)
    engine.step()
    engine.add("quarantined", [2] * 9, 6, num_losses=MAX_FAULTS)
    assert engine.scheduler.num_running == 0
    first = len(engine.executor.plans)
    while len(engine.outputs["quarantined"]) < 2:  # the second token shows that a decode works
        engine.step()
    plans = engine.executor.plans[first:]
    assert [plan.request_ids for plan in plans[:2]] == [("quarantined",), ("quarantined",)]
    engine.run()
    assert ("a", "quarantined") in [plan.request_ids for plan in engine.executor.plans]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_only_dead_step_is_one_whose_requests_have_all_ended(is_first: bool) -> None:
    engine = MockEngine(depth=2)
    for name in ("a", "b"):
        engine.add(name, [1] * 5, 9)
    assert not engine.scheduler.is_oldest_step_dead()  # there is none
    engine.step()
    engine.abort("a" if is_first else "b")
    assert not engine.scheduler.is_oldest_step_dead()
    engine.abort("b" if is_first else "a")
    assert engine.scheduler.is_oldest_step_dead()
    engine.run()


def test_sequences_that_have_begun_are_counted() -> None:
    engine = MockEngine(max_num_seqs=2)
    for name in ("a", "b", "waits"):
        engine.add(name, [1] * 5, 9)
    assert engine.scheduler.num_begun == 0
    engine.step()
    assert engine.scheduler.num_begun == 2
    engine.scheduler._requeue(engine.scheduler._requests["b"])
    assert engine.scheduler.num_begun == 2  # it goes on later
    engine.abort("b")
    assert engine.scheduler.num_begun == 1
    engine.run()


def test_tokens_that_running_requests_have_not_computed_are_counted() -> None:
    """At least one of each request: it draws more."""
    engine = MockEngine(max_num_seqs=2, max_num_batched_tokens=6)
    engine.add("long", [1] * 9, 9)
    engine.add("short", [1, 2], 9)
    assert engine.scheduler.num_running_tokens == 0
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_running_tokens) == (1, 9 - 6)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_running_tokens) == (2, 2)
    engine.run()


def test_without_chunked_prefill_no_prompt_is_split() -> None:
    engine = MockEngine(chunked=False, max_num_batched_tokens=MAX_MODEL_LEN, caching=False)
    for name in ("a", "b", "c"):
        engine.add(name, [1] * 30, 3)
    engine.run()
    assert all(count in (1, 30) for plan in engine.executor.plans for count in plan.num_scheduled_tokens.tolist())


def test_a_long_prompt_of_a_higher_priority_leaves_each_decode_its_token() -> None:
    engine = MockEngine(max_num_batched_tokens=8, policy="priority", caching=False)
    for name in ("a", "b"):
        engine.add(name, [1] * 3, 30, priority=1)
    engine.step()
    engine.step()
    engine.add("long", [2] * 40, 2, priority=0)
    before = len(engine.executor.plans)
    for _ in range(6):
        assert {output.request_id for output in engine.step()} >= {"a", "b"}
    assert all(plan.num_tokens == 8 for plan in engine.executor.plans[before : before + 6])
    engine.run()


def test_drafts_leave_other_requests_their_token() -> None:
    """Four requests with three drafts each want 16 tokens of a step, which has room for six."""
    engine = MockEngine(max_num_batched_tokens=6, num_speculative_tokens=3, caching=False)
    for i in range(4):
        engine.add(f"r{i}", [i] * 4, 12)
    engine.run()
    full = [plan for plan in engine.executor.plans if len(plan.request_ids) == 4]
    assert max(plan.num_tokens for plan in full) == 6


def test_at_most_so_many_prompts_are_computed_in_part() -> None:
    for most in (1, 2):
        engine = MockEngine(max_num_batched_tokens=40, max_num_seqs=4, extra_blocks=100, caching=False)
        engine.limit_times(
            ErraticTimes(0),
            max_num_partial_prefills=most,
            max_long_partial_prefills=most,
            long_prefill_token_threshold=64,
        )
        for i in range(4):
            engine.add(f"r{i}", [i] * 30, 2)
        engine.run()
        for plan in engine.executor.plans:
            ends = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
            assert sum(end < 30 for end in ends) <= most


def test_the_measured_time_of_a_step_reaches_the_model_of_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MockEngine()
    observed: list[float] = []
    times = ErraticTimes(0)
    monkeypatch.setattr(times, "observe", lambda load, seconds: (observed.append(seconds), 1.5)[1])
    engine.limit_times(times, target_seconds=10.0, max_step_seconds=10.0)
    run = engine.worker.execute_model

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
        output = run(plan)
        object.__setattr__(output, "compute_seconds", 0.25 * (plan.step_id + 1))
        return output

    engine.worker.execute_model = execute  # type: ignore[method-assign]
    engine.add("a", [1] * 5, 3)
    engine.run()
    assert observed == [0.25, 0.5, 0.75]
    assert engine.scheduler.limits.last_step == (1.5, 0.75)


def test_a_request_that_has_grown_long_waits_as_a_long_one() -> None:
    """After a preemption its tokens are computed again as a prompt."""
    engine = MockEngine()
    engine.limit_times(ErraticTimes(0), long_prefill_token_threshold=8)
    engine.add("a", [1] * 5, 20)
    request = engine.scheduler._requests["a"]
    for num_tokens in range(5, 12):
        assert request.num_tokens == num_tokens
        engine.step()
    assert not request.is_long
    engine.scheduler._requeue(request)
    assert request.is_long
    engine.run()


def test_the_first_plan_has_the_step_id_that_it_is_given() -> None:
    """Steps that were measured at the start have the ids before it."""
    scheduler = MockEngine().scheduler
    first = Scheduler(scheduler._config, scheduler._kv_cache, max_model_len=MAX_MODEL_LEN, first_step_id=7)
    sampling = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=3)
    core = EngineCoreRequest(request_id="a", sampling=sampling)
    first.add_request(core, np.ones(3, np.int32))
    plan = first.schedule()
    assert plan is not None and plan.step_id == 7


def test_a_prompt_is_kept_and_sent_once_for_all_its_sequences() -> None:
    """It may have 120,000 tokens, and 128 sequences. A resumed sequence has emitted tokens besides."""
    engine = MockEngine(extra_blocks=1000)
    config = replace(engine.scheduler._config, max_num_seqs=16, max_num_batched_tokens=4096)
    scheduler = Scheduler(config, engine.scheduler._kv_cache, max_model_len=4096)
    prompt = np.arange(2000, dtype=np.int32)
    sampling = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=9)
    tracemalloc.start()
    for index in range(16):
        emitted = (7, 8) if index == 15 else ()
        leader = "0" if index else None
        request_id, others = str(index), {"prompt_leader": leader, "emitted_token_ids": emitted}
        core = EngineCoreRequest(request_id=request_id, sampling=sampling, **others)
        scheduler.add_request(core, prompt)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 16 * 4096  # a copy of the prompt has 8000 bytes
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert [data.request_id for data in second.new_requests] == [str(index) for index in range(1, 16)]
    assert second.new_requests[-1].token_ids.tolist() == [*range(2000), 7, 8]
    frame = encode(ExecuteModel(epoch=0, scheduler_output=second))
    assert [len(segment) for segment in frame.segments] == [prompt.nbytes, prompt.nbytes + 8]


def test_the_blocks_of_a_prompt_are_named_once_for_all_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    num_named, extend = 0, BlockHasher.extend

    def counted(self: BlockHasher, root: bytes, hashes: list[bytes], *args: Any, **kwargs: Any) -> None:
        nonlocal num_named
        num_named -= len(hashes)
        extend(self, root, hashes, *args, **kwargs)
        num_named += len(hashes)

    monkeypatch.setattr(BlockHasher, "extend", counted)
    engine = MockEngine(extra_blocks=60)
    for index in range(4):
        engine.add(str(index), list(range(40)), 9, leader="0" if index else None)
    engine.run()
    # 40 of the 48 computed tokens are the prompt's. Its last block is not shared, because its last token is computed by each
    assert num_named == 9 + 4 * 3
