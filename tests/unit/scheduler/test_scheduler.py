"""The scheduler over a mock worker that checks every block it is shown: whatever the schedule, the tokens are the same."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config.engine import SchedulerConfig
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.request import EngineCoreRequest, FinishReason, ResolvedSampling
from inflight.kv_cache.manager import KVCacheManager
from inflight.kv_cache.sizing import blocks_per_sequence, make_groups
from inflight.sampling_params import SamplingParams
from inflight.scheduler.scheduler import Scheduler
from tests.mock_worker import MockWorker, mock_generate

VOCAB_SIZE = 50
MAX_MODEL_LEN = 64


@dataclass
class MockEngine:
    """The loop of `EngineCore` at depth 1, without an executor."""

    block_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    extra_blocks: int = 40
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    chunked: bool = True
    caching: bool = True
    policy: str = "fcfs"
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishReason] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = MockWorker(
            vocab_size=VOCAB_SIZE,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            windows=list(self.windows),
        )
        groups = make_groups([self.worker.get_kv_cache_specs()])[0]
        least = blocks_per_sequence(groups, num_tokens=MAX_MODEL_LEN, max_step_tokens=self.max_num_batched_tokens)
        block_bytes = max(len(group.layer_names) * group.spec.block_bytes for group in groups)
        config = KVCacheConfig(num_blocks=1 + least + self.extra_blocks, block_bytes=block_bytes, groups=groups)
        self.worker.initialize_from_config(config)
        self.kv_cache = KVCacheManager(config, fingerprint="mock", enable_prefix_caching=self.caching)
        scheduler_config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=self.chunked,
            policy=self.policy,
        )
        self.scheduler = Scheduler(scheduler_config, self.kv_cache, max_model_len=MAX_MODEL_LEN)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        stop: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        priority: int = 0,
        salt: str = "",
        leader: str | None = None,
    ) -> None:
        self.outputs[request_id] = []
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
        self.scheduler.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=np.array(prompt, dtype=np.int32),
                sampling=ResolvedSampling(params=params, seed=0, max_tokens=max_tokens, stop_token_ids=stop),
                arrival_time=0.0,
                priority=priority,
                cache_salt=salt,
                prompt_leader=leader,
            )
        )

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        assert plan.num_tokens <= self.max_num_batched_tokens
        for output in self.scheduler.update_from_output(plan, self.worker.execute_model(plan)):
            self.outputs[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
                self.order.append(output.request_id)
        self.scheduler.check_integrity()
        return True

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                break
        assert not self.scheduler.has_unfinished_requests()
        assert self.kv_cache.usage == 0.0


def expected(prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    return mock_generate(prompt, min(max_tokens, MAX_MODEL_LEN - len(prompt)), VOCAB_SIZE, stop)


@st.composite
def engines(draw: st.DrawFn) -> MockEngine:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    chunked = draw(st.booleans())
    max_num_seqs = draw(st.integers(1, 5))
    return MockEngine(
        block_size=block_size,
        windows=tuple(draw(st.lists(st.sampled_from([None, 1, 3, 7, 16]), min_size=1, max_size=4))),
        extra_blocks=draw(st.sampled_from([0, 0, 3, 10, 60])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)) if chunked else MAX_MODEL_LEN,
        chunked=chunked,
        caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )


# few distinct beginnings, so that prompts share blocks
PROMPTS = st.builds(
    lambda a, b, tail: [a] * b + tail,
    st.integers(0, 2),
    st.integers(1, 30),
    st.lists(st.integers(0, 3), max_size=20),
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "fork", "abort", "step", "step", "step", "reset"]),
        PROMPTS,
        st.integers(1, 24),
        st.integers(0, 9),
    ),
    min_size=3,
    max_size=30,
)


@settings(max_examples=1000 if os.environ.get("INFLIGHT_TEST_FULL") else 150)
@given(engine=engines(), events=EVENTS)
def test_any_schedule_gives_the_same_tokens(engine: MockEngine, events: list[tuple[str, list[int], int, int]]) -> None:
    prompts: dict[str, tuple[list[int], int, frozenset[int]]] = {}
    aborted: set[str] = set()
    for i, (kind, prompt, max_tokens, number) in enumerate(events):
        stop = frozenset({number}) if number % 3 == 0 else frozenset()
        if kind == "add":
            prompts[f"r{i}"] = (prompt, max_tokens, stop)
            engine.add(f"r{i}", prompt, max_tokens, stop=stop, priority=number, salt="a" if number == 1 else "")
        elif kind == "fork":
            for child in range(3):
                prompts[f"r{i}c{child}"] = (prompt, max_tokens + child, stop)
                leader = f"r{i}c0" if child else None
                engine.add(f"r{i}c{child}", prompt, max_tokens + child, stop=stop, leader=leader)
        elif kind == "abort" and prompts:
            victim = sorted(prompts)[number % len(prompts)]
            engine.scheduler.abort_requests([victim, "unknown"])
            engine.scheduler.check_integrity()
            aborted.add(victim)
        elif kind == "reset":
            engine.scheduler.reset_prefix_cache()
            engine.scheduler.check_integrity()
        else:
            engine.step()
    engine.run()
    for request_id, (prompt, max_tokens, stop) in prompts.items():
        wanted, got = expected(prompt, max_tokens, stop), engine.outputs[request_id]
        if request_id in aborted and request_id not in engine.finished:
            assert got == wanted[: len(got)]
        else:
            assert got == wanted, request_id


def test_preemption_happens_and_loses_nothing() -> None:
    engine = MockEngine(extra_blocks=0, max_num_seqs=4, caching=False)
    for i in range(4):
        engine.add(f"r{i}", [i] * 20, 40)
    engine.run()
    assert engine.scheduler.stats.num_preemptions > 0
    for i in range(4):
        assert engine.outputs[f"r{i}"] == expected([i] * 20, 40)
    assert engine.order[0] == "r0"  # the first to come is never the victim


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


def test_children_compute_the_shared_prompt_once() -> None:
    prompt = [1] * 30
    for caching in (False, True):
        engine = MockEngine(caching=caching, extra_blocks=60)
        for child in range(4):
            engine.add(f"c{child}", prompt, 2, leader="c0" if child else None)
        engine.run()
        # the leader computes 30, each child the last two (28 are in 7 full blocks), and one decode step each
        assert engine.worker.num_computed_tokens == 30 + 3 * 2 + 4
        assert all(engine.outputs[f"c{child}"] == expected(prompt, 2) for child in range(4))


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


def test_a_sliding_window_frees_the_blocks_that_leave_it() -> None:
    engine = MockEngine(windows=(8,), caching=False, max_num_batched_tokens=8)
    engine.add("a", [1] * 40, 20)
    held = []
    while engine.step():
        held.append(engine.kv_cache.pool.num_blocks - 1 - engine.kv_cache.pool.num_free_blocks)
    assert max(held) <= (8 + 8) // 4 + 2  # window and step, not 15 blocks
    assert engine.outputs["a"] == expected([1] * 40, 20)


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


def test_a_voided_step_is_planned_again_in_full() -> None:
    engine = MockEngine()
    engine.add("a", [1] * 10, 5)
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.scheduler.void(plan)  # the worker never saw it
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.outputs["a"] == expected([1] * 10, 5)


def test_an_abort_while_the_step_is_in_flight_is_passed_over_at_commit() -> None:
    engine = MockEngine()
    engine.add("a", [1] * 10, 5)
    engine.add("b", [2] * 10, 5)
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.scheduler.abort_requests(["a"])
    outputs = engine.scheduler.update_from_output(plan, engine.worker.execute_model(plan))
    assert [output.request_id for output in outputs] == ["b"]
    engine.outputs["b"].extend(itertools.chain(*(output.new_token_ids for output in outputs)))
    engine.run()
    assert engine.outputs["b"] == expected([2] * 10, 5)


def test_a_row_from_which_nothing_can_be_drawn_fails_alone() -> None:
    engine = MockEngine()
    engine.add("a", [1] * 10, 5)
    engine.add("b", [2] * 10, 5)
    plan = engine.scheduler.schedule()
    assert plan is not None
    output = engine.worker.execute_model(plan)
    output.sampled_token_ids[0] = -1
    first, second = engine.scheduler.update_from_output(plan, output)
    assert (first.request_id, first.finish_reason, first.new_token_ids) == ("a", FinishReason.ERROR, ())
    assert "no token could be drawn" in first.error
    engine.outputs["b"].extend(second.new_token_ids)
    engine.run()
    assert engine.outputs["b"] == expected([2] * 10, 5)
