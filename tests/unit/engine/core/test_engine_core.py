"""`EngineCore` at every depth and stagger: whatever the schedule, and whatever fails, the tokens are the same.

`MockEngine` checks the rest as it happens: blocks, slots and queues after every event, each token as it comes out, each plan.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config.engine import EngineConfig
from inflight.engine.core.engine_core import EngineCore
from inflight.engine.core.step_loop import IDLE_SECONDS, CoreListener
from inflight.interface.request import FinishReason
from inflight.interface.step import ModelRunnerOutput
from inflight.kv_cache.block_pool import BlockPool
from inflight.structured_output.backend import CompiledGrammar
from inflight.structured_output.spec import GrammarSpec
from inflight.timeline import Event
from tests.conformance.configs import engine_config
from tests.support.erratic_times import ErraticTimes
from tests.support.mock_engine import MAX_MODEL_LEN, MockEngine
from tests.support.toy_grammar import ToyBackend
from tests.unit.engine.core.core_cases import step
from tests.unit.engine.core.shrink_budget import ShrinkBudget

ScheduleEvent = tuple[str, list[int], int, int]  # kind, prompt, max_tokens, number
FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"


@st.composite
def engines(draw: st.DrawFn) -> MockEngine:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    chunked = draw(st.booleans())
    max_num_seqs = draw(st.integers(1, 5))
    engine = MockEngine(
        block_size=block_size,
        windows=tuple(draw(st.lists(st.sampled_from([None, 1, 3, 7, 16]), min_size=1, max_size=4))),
        extra_blocks=draw(st.sampled_from([0, 0, 3, 10, 60])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)) if chunked else MAX_MODEL_LEN,
        chunked=chunked,
        caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        depth=draw(st.integers(1, 4)),
        stagger=draw(st.integers(1, 3)),
        num_speculative_tokens=draw(st.sampled_from([0, 0, 1, 3])),
        fault_tolerance=draw(st.booleans()),
    )
    if draw(st.booleans()):
        engine.lose_arenas()
    if chunked and draw(st.booleans()):
        engine.limit_times(
            ErraticTimes(seed=0),
            target_seconds=draw(st.sampled_from([None, 0.01, 1.0])),
            max_step_seconds=1.0,
            max_num_partial_prefills=draw(st.integers(1, 3)),
            long_prefill_token_threshold=draw(st.sampled_from([2, 8, 100])),
        )
    return engine


# few distinct beginnings, so that prompts share blocks
PROMPTS = st.builds(
    lambda a, b, tail: [a] * b + tail, st.integers(0, 2), st.integers(1, 30), st.lists(st.integers(0, 3), max_size=20)
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "grammar", "grammar", "fork", "abort", "fail", "late", "preempt", "reset", *["step"] * 5]
        ),
        PROMPTS,
        st.integers(1, 24),
        st.integers(0, 9),
    ),
    min_size=3,
    max_size=30,
)


@pytest.fixture(scope="module")
def shrinking() -> ShrinkBudget:
    return ShrinkBudget(20.0)


@settings(max_examples=2000 if FULL else 120)
@given(engine=engines(), events=EVENTS)
def test_any_schedule_gives_the_same_tokens(
    shrinking: ShrinkBudget, engine: MockEngine, events: list[ScheduleEvent]
) -> None:
    with shrinking.example(engine, events):
        run_schedule(engine, events)


def run_schedule(engine: MockEngine, events: list[ScheduleEvent]) -> None:
    """An event's number chooses: who is aborted or preempted, which step fails, how many steps run unasked."""
    for i, (kind, prompt, max_tokens, number) in enumerate(events):
        stop = frozenset(range(number * 2)) if number % 3 == 0 else frozenset()
        if kind == "add":
            salt = "a" if number == 1 else ""
            logprobs = number % 4 == 0
            engine.add(f"r{i}", prompt, max_tokens, stop=stop, priority=number, salt=salt, prompt_logprobs=logprobs)
        elif kind == "grammar":
            grammar = "bad" if number == 0 else str(10 * i + number)
            engine.add(f"r{i}", prompt, max_tokens, stop=stop, priority=number, grammar=grammar)
        elif kind == "fork":
            grammar = str(10 * i) if number % 2 else None
            for child in range(3):
                leader = f"r{i}c0" if child else None
                engine.add(
                    f"r{i}c{child}",
                    prompt,
                    max_tokens + child,
                    stop=stop,
                    priority=number,
                    leader=leader,
                    grammar=grammar,
                )
        elif kind == "abort" and engine.wanted:
            engine.abort(sorted(engine.wanted)[number % len(engine.wanted)])
        elif kind == "fail":
            engine.executor.failing[engine.executor.next_step_id + number // 2 - 2] = number % 2 == 0
        elif kind == "preempt" and engine.scheduler.num_running:
            running = engine.scheduler._running
            engine.scheduler._requeue(running[number % len(running)])
            engine.scheduler.check_integrity()
        elif kind == "late":
            for _ in range(number % 4):
                engine.executor.run_next()
        elif kind == "reset":
            engine.core.reset_prefix_cache()
            engine.scheduler.check_integrity()
        else:
            step(engine)
    for _ in range(10_000):
        if not engine.core.has_unfinished_requests():
            break
        step(engine)
    engine.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_time_without_requests_is_on_the_timeline(depth: int) -> None:
    """From the end of the last request, however it ends, to the plan of the next step."""
    engine = MockEngine(depth=depth)

    def idle() -> list[Event]:
        return [event for event in engine.core.timeline.events() if event.phase == "idle"]

    engine.add("a", [1, 2, 3], max_tokens=3)
    engine.add("b", [1, 2, 3], max_tokens=5)
    engine.run()
    ended = time.perf_counter_ns()
    engine.core.abort_requests(["unknown"])
    assert [event.step_id for event in idle()] == [0]
    engine.add("c", [4, 5], max_tokens=9)
    next_step = engine.executor.next_step_id
    engine.step()
    assert idle()[-1].start_ns < ended
    engine.abort("c")
    engine.add("d", [4, 5], max_tokens=2)
    after_abort = engine.executor.next_step_id
    engine.run()
    assert [event.step_id for event in idle()] == [0, next_step, after_abort]
    for event in idle()[1:]:
        others = [other for other in engine.core.timeline.events() if other.phase == "plan"]
        assert all(other.end_ns <= event.start_ns or other.start_ns >= event.end_ns for other in others)


@pytest.mark.parametrize("shares_cores", [True, False])
def test_the_statistics_say_whether_the_newest_step_shared_its_cores(shares_cores: bool) -> None:
    engine, shares = MockEngine(), iter([not shares_cores, shares_cores])
    worker: Any = engine.worker
    execute_model = worker.execute_model
    worker.execute_model = lambda plan: replace(execute_model(plan), shares_cores=next(shares))
    engine.add("a", [1, 2, 3], max_tokens=2)
    engine.run()
    assert engine.core.take_stats().shares_cores == shares_cores


def test_a_call_commits_the_steps_in_flight_and_loses_nothing() -> None:
    """Some of them wait for masks: without their commits it would wait for ever."""
    engine = MockEngine(depth=4, stagger=2)
    for i in range(3):
        engine.add(f"r{i}", [i] * 5, 12, grammar=str(i))
    engine.scheduler.wait_for_grammars()  # else they may run one after the other
    calls = []
    while engine.core.has_unfinished_requests():
        engine.step()
        in_flight = len(engine.core._in_flight)
        assert engine.core.collective_rpc("echo", (in_flight,), {"a": 1}) == [("echo", (in_flight,), {"a": 1})]
        assert not engine.core._in_flight
        calls.append(in_flight)
    assert max(calls) >= 2
    engine.run()


def test_what_arrives_during_a_step_is_planned_before_its_end_if_more_may_be_in_flight() -> None:
    """With a stagger of 2 a lone request is in every other step."""
    arrivals = ["b", "c"]
    seen: list[tuple[int, bool]] = []  # (plans so far, whether the oldest step is done)

    class Listener(CoreListener):
        may_add = True

        def wait_for_arrival(self, step: Future[ModelRunnerOutput]) -> bool:
            seen.append((len(engine.executor.plans), step.done()))
            if arrivals:
                engine.add(arrivals.pop(0), [1] * 5, 9)
                return True
            return False

    engine = MockEngine(depth=3, stagger=2, listener=Listener())
    engine.add("a", [1] * 5, 9)
    engine.step()
    assert seen == [(1, False)], "then as many are in flight as may be: the step is waited for"
    assert [plan.request_ids for plan in engine.executor.plans[:3]] == [("a",), ("b",), ("a",)]
    engine.run()
    assert arrivals == [] and set(engine.finished) == {"a", "b", "c"}


def test_nothing_of_an_aborted_request_is_returned() -> None:
    engine = MockEngine(depth=2)
    engine.add("a", [1] * 5, 10)
    engine.add("bad", [1] * 5, 10, grammar="bad")
    engine.step()
    engine.core.collective_rpc("hold outputs")
    engine.scheduler.wait_for_grammars()
    engine.core.abort_requests(["a", "bad"])
    assert engine.core.step() == []
    assert not engine.core.has_unfinished_requests()
    engine.grammars.close()


def test_nobody_is_preempted_for_drafts() -> None:
    counts = []
    for num_drafts in (0, 4):
        engine = MockEngine(
            extra_blocks=0, max_num_seqs=4, max_num_batched_tokens=64, caching=False, num_speculative_tokens=num_drafts
        )
        engine.add("a", [1] * 4, 50)
        engine.add("b", [2] * 4, 6)
        while "b" not in engine.finished:
            engine.step()
        counts.append(engine.scheduler.stats.num_preemptions)
        engine.run()
    assert counts == [0, 0]


def test_requests_wait_for_their_grammars_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    compile_toy = ToyBackend._compile

    def compile_late(self: ToyBackend, spec: GrammarSpec) -> CompiledGrammar:
        assert released.wait(100)
        return compile_toy(self, spec)

    monkeypatch.setattr(ToyBackend, "_compile", compile_late)
    engine = MockEngine()
    engine.add("late", [1] * 5, 20, grammar="3")
    start = time.monotonic()
    assert engine.step() == []  # nothing to do: it waits a moment, and gives way
    assert IDLE_SECONDS <= time.monotonic() - start < 60
    engine.add("bad", [1] * 5, 20, grammar="bad")
    engine.add("plain", [2] * 5, 3)
    while "plain" not in engine.finished:
        engine.step()
    assert engine.outputs["late"] == []
    engine.core.abort_requests(["late"])
    engine.aborted.add("late")
    engine.add("again", [1] * 5, 20, grammar="4")
    released.set()
    engine.run()
    assert engine.finished["bad"] is FinishReason.ERROR


def test_what_arrives_while_a_step_runs_is_in_the_next_plan() -> None:
    class Listener(CoreListener):
        def before_plan(self) -> None:
            if "a" in engine.wanted and engine.executor.plans and "b" not in engine.wanted:
                engine.add("b", [4, 5], max_tokens=3)

    engine = MockEngine(depth=1, listener=Listener())
    engine.add("a", [1, 2, 3], max_tokens=6)
    engine.step()
    engine.step()
    assert engine.executor.plans[-1].request_ids == ("a", "b")
    engine.run()


def test_the_statistics_of_steps() -> None:
    """Each step but the first after an idle time has a gap before it."""
    engine = MockEngine(max_num_batched_tokens=4)
    engine.limit_times(ErraticTimes(seed=1), target_seconds=None, max_step_seconds=1.0)
    worker: Any = engine.worker
    execute_model, num_steps = worker.execute_model, 0
    worker.execute_model = lambda plan: replace(execute_model(plan), compute_seconds=0.25)
    for name, prompt in (("a", [1] * 6), ("b", [2] * 5)):
        engine.add(name, prompt, 3)
        engine.run()
        plans, num_steps = engine.executor.plans[num_steps:], len(engine.executor.plans)
        stats = engine.core.take_stats()
        assert stats.step_id == plans[-1].step_id
        assert stats.step_tokens == tuple(plan.num_tokens for plan in plans)
        assert len(stats.step_gaps) == len(plans) - 1 and min(stats.step_gaps) >= 0
        assert stats.counts.num_queried_tokens == len(prompt)
        commits = [event.details for event in engine.core.timeline.events() if event.phase == "commit"][-len(plans) :]
        assert all(details is not None and details["measured_ms"] == 250.0 for details in commits)
        predicted = [details["predicted_ms"] for details in commits if details is not None]
        assert stats.step_time_ratios == pytest.approx([250.0 / each for each in predicted], rel=0.01)
    again = engine.core.take_stats()
    assert (again.step_tokens, again.step_gaps, again.step_time_ratios) == ((), (), ())
    assert (again.step_id, again.counts.num_queried_tokens, again.num_running) == (stats.step_id, 0, 0)


@pytest.mark.parametrize("reset_connector", [False, True])
def test_a_reset_reaches_the_tiers_only_on_request(monkeypatch: pytest.MonkeyPatch, reset_connector: bool) -> None:
    engine, forgotten, reset = MockEngine(), list[bool](), list[bool]()
    monkeypatch.setattr(engine.scheduler.transfers, "forget_tiers", lambda: forgotten.append(True))
    monkeypatch.setattr(
        engine.scheduler, "reset_prefix_cache", lambda *, reset_host_pool: reset.append(reset_host_pool)
    )
    engine.core.reset_prefix_cache(reset_connector=reset_connector)
    assert (forgotten, reset) == ([True] * reset_connector, [reset_connector])


def make_core(config: EngineConfig) -> tuple[EngineCore, list[Any]]:
    """A core whose parts only note their calls."""
    calls: list[Any] = []

    def noting(name: str) -> Any:
        return lambda *args, **named: calls.append((name, args, named)) or f"from {name}"  # type: ignore[func-returns-value]

    scheduler: Any = SimpleNamespace(
        has_unfinished_requests=lambda: False,
        has_failures=False,
        schedule=lambda: None,
        take_failures=list,
        **{name: noting(name) for name in ("add_request", "wait_for_grammars")},
        transfers=SimpleNamespace(is_busy=False, wait=noting("wait")),
    )
    executor: Any = SimpleNamespace(collective_rpc=noting("collective_rpc"), set_death_callback=lambda _: None)
    group = SimpleNamespace(is_whole=True, num_needed=0)
    cache: Any = SimpleNamespace(groups=[group], pool=BlockPool(3), watch_blocks=noting("watch_blocks"))
    kv_cache_config: Any = SimpleNamespace(block_bytes=10, num_slots=7)
    return EngineCore(config, executor, scheduler, cache, kv_cache_config, None, CoreListener()), calls


def test_what_a_core_does_only_if_the_configuration_says_so() -> None:
    config = engine_config(tensor_parallel_size=2, pipeline_parallel_size=3)

    def watched(core: EngineCore) -> list[Any]:
        return [core.cached_names and core.cached_names.kinds, core.block_events]

    core, calls = make_core(config)
    assert (watched(core), calls) == ([None, None], [])
    core, calls = make_core(replace(config, parallel=replace(config.parallel, routes_by_prefix=True)))
    assert watched(core) == [(0,), None]
    events: Any = object()
    core, calls = make_core(replace(config, cache=replace(config.cache, events=events)))
    assert watched(core) == [None, "from watch_blocks"]


@pytest.mark.parametrize("backend", ["mp", "external_launcher"])
def test_engines_that_plan_the_same_wait_for_the_grammars_of_new_requests(backend: str) -> None:
    core, calls = make_core(engine_config(backend=backend))
    request: Any = object()
    core.add_request(request, np.array([1], dtype=np.int32))
    assert [name for name, _, _ in calls] == ["add_request"] + ["wait_for_grammars"] * (backend == "external_launcher")
    assert calls[1:] in ([], [("wait_for_grammars", (), {})]), "for all, however long it takes"


@pytest.mark.parametrize(
    ("is_busy", "has_failures", "waits"),
    [
        (False, False, [("wait_for_grammars", (IDLE_SECONDS,), {"for_all": False})]),
        (True, False, [("wait", (IDLE_SECONDS,), {})]),
        (True, True, []),
        (False, True, []),
    ],
)
def test_a_step_with_nothing_to_run_waits_for_what_may_come_first(
    is_busy: bool, has_failures: bool, waits: Any
) -> None:
    core, calls = make_core(engine_config())
    scheduler: Any = core.scheduler
    scheduler.has_failures, scheduler.transfers.is_busy = has_failures, is_busy
    assert core.step() == []
    assert calls == waits
