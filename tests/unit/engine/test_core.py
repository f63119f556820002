"""`EngineCore` at every depth and stagger: whatever the schedule, and whatever fails, the tokens are the same.

`MockEngine` checks the rest as it happens: blocks, slots and queues after every event, each token as it comes out, each plan.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.core import IDLE_SECONDS
from inflight.errors import EngineDeadError, RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.executor.recovery import RecoveryResult
from inflight.interface.request import FinishReason
from inflight.interface.statistics import FaultStatus
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.scheduler.suspects import MAX_FAULTS
from inflight.structured_output.backend import CompiledGrammar
from inflight.structured_output.spec import GrammarSpec
from inflight.timeline import Event
from tests.erratic_times import ErraticTimes
from tests.mock_engine import MAX_MODEL_LEN, VOCAB_SIZE, MockEngine
from tests.shrink_budget import ShrinkBudget
from tests.toy_grammar import ToyBackend

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
    lambda a, b, tail: [a] * b + tail,
    st.integers(0, 2),
    st.integers(1, 30),
    st.lists(st.integers(0, 3), max_size=20),
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


def step(engine: MockEngine) -> None:
    """One step; one that fails leaves nothing in flight."""
    oldest = engine.core._in_flight[0][0].step_id if engine.core._in_flight else engine.executor.next_step_id
    try:
        engine.step()
    except StepError:
        assert oldest in engine.executor.failing and not engine.core._in_flight


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


def test_a_step_that_fails_is_logged_once_with_everything_that_was_known(caplog: pytest.LogCaptureFixture) -> None:
    """It is named, also where it is not the oldest in flight: its error is there before the oldest has been answered."""
    engine = MockEngine(depth=3)
    engine.add("a", [1] * 5, 20)
    engine.step()
    engine.executor.failing[2] = True
    engine.step()
    assert not caplog.records
    with pytest.raises(StepError, match="injected"):
        engine.step()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("inflight.engine.core", "ERROR")
    for part in (
        "injected\nThe plan was:\nstep 2: 1 requests, 1 tokens\n  a: slot 0, tokens [6, 7), samples",
        "1 requests run, 0 wait;",
        "KV blocks are free; 3 steps in flight",
        "a: RUNNING, slot 0, 5 prompt tokens, 2 emitted, 9 of 10 planned, 3 blocks, in 3 steps in flight",
        "Steps in flight: 2, 3, 4",
    ):
        assert part in record.getMessage()
    engine.run()
    assert len(caplog.records) == 1


def test_a_defect_of_the_scheduler_ends_in_the_same_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MockEngine(depth=2)
    engine.add("a", [1] * 5, 20)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "update_from_output", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.core.step()
    assert "modulo by zero" in caplog.text and "step 1: 1 requests" in caplog.text and "Traceback" in caplog.text
    engine.run()


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


def test_a_failure_of_a_step_that_is_left_over_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests have ended: the next ones, planned behind it, are computed again, and no caller hears of it."""
    engine = MockEngine(depth=2)
    engine.add("a", [1] * 5, 10, stop=frozenset(range(VOCAB_SIZE)))
    engine.step()
    assert engine.finished == {"a": FinishReason.STOP}
    assert len(engine.core._in_flight) == 1
    engine.executor.failing[1] = True
    engine.add("b", [2] * 5, 3)
    engine.run()
    assert "step 1: 1 requests" in caplog.text
    assert engine.finished["b"] is FinishReason.LENGTH


def test_what_arrives_during_a_step_is_planned_before_its_end_if_more_may_be_in_flight() -> None:
    """With a stagger of 2 a lone request is in every other step."""
    engine = MockEngine(depth=3, stagger=2)
    arrivals = ["b", "c"]
    seen: list[tuple[int, bool]] = []  # (plans so far, whether the oldest step is done)

    def wait_for_arrival(future: Future[ModelRunnerOutput]) -> bool:
        seen.append((len(engine.executor.plans), future.done()))
        if arrivals:
            engine.add(arrivals.pop(0), [1] * 5, 9)
            return True
        return False

    engine.core.wait_for_arrival = wait_for_arrival
    engine.add("a", [1] * 5, 9)
    engine.step()
    assert seen == [(1, False)], "then as many are in flight as may be: the step is waited for"
    assert [plan.request_ids for plan in engine.executor.plans[:3]] == [("a",), ("b",), ("a",)]
    engine.run()
    assert arrivals == [] and set(engine.finished) == {"a", "b", "c"}


def fail_on(engine: MockEngine, step_id: int, error: Exception) -> None:
    """Whatever the step computes, this is its answer."""
    run = engine.worker.execute_model

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
        if plan.step_id == step_id:
            engine.worker.apply(plan)
            raise error
        return run(plan)

    engine.worker.execute_model = execute  # type: ignore[method-assign]


def assert_dead(engine: MockEngine, cause: str) -> None:
    assert engine.core.is_dead
    for call in (engine.core.step, partial(engine.core.collective_rpc, "echo"), engine.core.check_alive):
        with pytest.raises(EngineDeadError, match=f"the engine has failed; .*{cause}") as caught:
            call()
        assert caught.value.summary
    engine.scheduler.check_integrity()
    engine.grammars.close()


def test_a_failed_step_of_several_ranks_is_the_end_and_its_cause_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """The step that is waited for has the echo: a younger one has the error that explains it."""
    engine = MockEngine(depth=3)
    engine.core._has_peers = True
    echo = StepError("left alone", rank=0, step_id=1, is_echo=True)
    cause = StepError("step 2 failed\nTraceback", rank=1, step_id=2)
    fail_on(engine, 1, echo)
    asked: list[RankError] = []

    def root_cause(error: RankError) -> RankError:
        assert not engine.core._in_flight  # masks have been given up: the answer may have waited for them
        asked.append(error)
        return cause

    engine.executor.root_cause = root_cause  # type: ignore[attr-defined]
    engine.add("a", [1] * 5, 20)
    engine.step()
    with pytest.raises(StepError) as caught:
        engine.step()
    assert (caught.value, asked) == (cause, [echo])
    (record,) = caplog.records
    assert "step 2 failed\nTraceback\nThe plan was:\nstep 2: 1 requests" in record.getMessage()
    assert_dead(engine, "step 2 failed$")
    assert len(caplog.records) == 1


def test_a_failure_that_is_left_over_is_the_end_of_several_ranks_too() -> None:
    engine = MockEngine(depth=2)
    engine.core._has_peers = True
    engine.executor.root_cause = lambda error: error  # type: ignore[attr-defined]
    fail_on(engine, 1, StepError("bad luck", rank=0, step_id=1))
    engine.add("a", [1] * 5, 10, stop=frozenset(range(VOCAB_SIZE)))
    engine.step()
    with pytest.raises(StepError, match="bad luck"):
        engine.step()
    assert_dead(engine, "bad luck")


@pytest.mark.parametrize("kind", [StepTimeoutError, WorkerDiedError])
def test_a_rank_that_is_silent_or_gone_is_the_end(kind: type[RankError]) -> None:
    """Nobody knows what it is doing, or whether it does; and its old steps may hold what new ones need."""
    engine = MockEngine(depth=2)
    fail_on(engine, 1, kind("silence", rank=0, step_id=1))
    engine.add("a", [1] * 5, 20)
    engine.step()
    with pytest.raises(kind, match="silence"):
        engine.step()
    assert_dead(engine, "silence")


def test_one_rank_goes_on_only_if_it_can_still_compute(caplog: pytest.LogCaptureFixture) -> None:
    engine = MockEngine(depth=2)
    fail_on(engine, 1, StepError("bad luck", rank=0, step_id=1))
    checked: list[int] = []

    def check_health() -> None:
        checked.append(len(engine.executor.plans))
        raise StepError("no memory can be read", rank=0)

    engine.executor.check_health = check_health  # type: ignore[method-assign]
    engine.add("a", [1] * 5, 20)
    engine.step()
    with pytest.raises(StepError, match="bad luck"):
        engine.step()
    assert checked == [3]
    assert "the rank cannot run more steps: no memory can be read" in caplog.text
    assert_dead(engine, "bad luck")


# -- recovery --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [StepError, StepTimeoutError, WorkerDiedError])
def test_after_a_recovery_every_request_goes_on_from_its_tokens(kind: type[RankError]) -> None:
    """`MockEngine` compares the tokens. The new rank's cache is empty, so a cached block would give wrong ones."""
    engine = MockEngine(depth=2, fault_tolerance=True)
    engine.lose_arenas()
    statuses: list[FaultStatus] = []
    begun: set[str] = set()

    def note(status: FaultStatus) -> None:
        statuses.append(status)
        begun.update(*(plan.request_ids for plan in engine.executor.plans if not begun))

    engine.core.on_fault_status = note
    engine.add("before", [1] * 9, 2)
    while engine.core.has_unfinished_requests():
        engine.step()
    fail_on(engine, engine.executor.next_step_id + 2, kind("bad luck", rank=0, step_id=4))
    engine.add("a", [1] * 9, 12)
    engine.add("b", [2] * 5, 12, grammar="3")
    engine.run()
    assert [str(error) for error in engine.executor.recoveries] == ["bad luck"]
    assert [(status.state, status.epoch) for status in statuses] == [("recovering", 0), ("healthy", 0)]
    status = engine.core.fault_status()
    cause = {StepError: "step_failed", StepTimeoutError: "rank_hung", WorkerDiedError: "rank_died"}[kind]
    assert (status.num_recoveries, status.last_cause) == ({cause: 1}, "bad luck")
    assert status.num_resumed_requests == len(begun - {"before"})  # the grammar of b may have been compiled too late


def test_a_running_request_that_is_in_no_step_in_flight_is_sent_in_full_to_a_new_rank() -> None:
    """With a stagger of 2 each step computes half of the requests."""
    for failing_step in range(12):
        engine = MockEngine(stagger=2, fault_tolerance=True)
        engine.lose_arenas()
        engine.executor.failing[failing_step] = False
        for i in range(4):
            engine.add(f"r{i}", [i] * 5, 8)
        engine.run()
        assert len(engine.executor.recoveries) == 1


def test_a_failed_recovery_is_the_end() -> None:
    engine = MockEngine(fault_tolerance=True)
    cause = WorkerDiedError("silence", rank=0)

    def recover(error: RankError) -> RecoveryResult:
        raise error

    engine.executor.recover = recover  # type: ignore[method-assign]
    fail_on(engine, 1, cause)
    engine.add("a", [1] * 5, 20)
    engine.step()
    with pytest.raises(WorkerDiedError, match="silence"):
        engine.step()
    assert_dead(engine, "silence")
    assert engine.core.fault_status().state == "failed"


def test_a_rank_that_is_lost_while_the_engine_is_idle_is_replaced() -> None:
    engine = MockEngine(fault_tolerance=True)
    lost = [WorkerDiedError("gone", rank=0)]

    def raise_if_lost() -> None:
        if lost:
            raise lost.pop()

    engine.executor.raise_if_lost = raise_if_lost  # type: ignore[attr-defined]
    engine.core.check_ranks()
    assert engine.core.fault_status().num_recoveries == {"rank_died": 1}
    engine.add("a", [1] * 5, 5)
    engine.run()


def test_without_resumption_the_requests_of_the_failed_steps_end_and_others_go_on() -> None:
    engine = MockEngine(fault_tolerance=True, max_num_seqs=2)
    fault_tolerance = FaultToleranceConfig(resume_requests_after_recovery=False)
    engine.core._fault_tolerance = fault_tolerance
    fail_on(engine, 1, StepError("bad luck", rank=0, step_id=1))
    for name in ("a", "b", "c"):
        engine.add(name, [1] * 5, 5)
    engine.run()
    ended = [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
    assert [engine.finished[name] for name in ("a", "b", "c")] == ended


class Poison:
    """Fails every step in which the request has a row, from its `num_tokens`-th token on."""

    def __init__(self, engine: MockEngine, request_id: str, num_tokens: int) -> None:
        self.failed: list[tuple[str, ...]] = []  # the requests of each failed step
        run = engine.worker.execute_model

        def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
            if request_id in plan.request_ids:
                row = plan.request_ids.index(request_id)
                if int(plan.num_computed_tokens[row] + plan.num_scheduled_tokens[row]) >= num_tokens:
                    engine.worker.apply(plan)
                    self.failed.append(tuple(plan.request_ids))
                    raise StepError("poisoned", rank=0, step_id=plan.step_id)
            return run(plan)

        engine.worker.execute_model = execute  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_poisoned_request_ends_alone(depth: int, num_tokens: int) -> None:
    """It fails in the prompt, or after some tokens. All others get all their tokens."""
    engine = MockEngine(depth=depth, fault_tolerance=True, max_num_seqs=8)
    poison = Poison(engine, "bad", num_tokens)
    for i in range(4):
        engine.add(f"r{i}", [i] * 5, 15)
    engine.add("bad", [7] * 5, 15)
    engine.run()
    assert engine.finished["bad"] is FinishReason.ERROR
    assert all(engine.finished[f"r{i}"] is FinishReason.LENGTH for i in range(4))
    assert len(poison.failed) == 4
    assert poison.failed[-1] == ("bad",)
    assert len(engine.outputs["bad"]) == max(num_tokens - 5, 0)


def test_two_poisoned_requests_end_and_what_arrives_meanwhile_waits_only_for_them() -> None:
    engine = MockEngine(depth=2, fault_tolerance=True, max_num_seqs=8)
    Poison(engine, "bad", 7)
    Poison(engine, "worse", 6)
    for name in ("r0", "bad", "worse", "r1"):
        engine.add(name, [len(name)] * 5, 15)
    while len(engine.executor.recoveries) < 3:
        engine.step()
    engine.add("late", [9] * 5, 15)
    engine.run()
    ended_well = {name for name, reason in engine.finished.items() if reason is FinishReason.LENGTH}
    assert ended_well == {"r0", "r1", "late"}


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
        assert released.wait(5)
        return compile_toy(self, spec)

    monkeypatch.setattr(ToyBackend, "_compile", compile_late)
    engine = MockEngine()
    engine.add("late", [1] * 5, 20, grammar="3")
    start = time.monotonic()
    assert engine.step() == []  # nothing to do: it waits a moment, and gives way
    assert IDLE_SECONDS <= time.monotonic() - start < 50 * IDLE_SECONDS
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
    engine = MockEngine(depth=1)
    engine.add("a", [1, 2, 3], max_tokens=6)
    engine.step()
    engine.core.before_plan = lambda: None if "b" in engine.wanted else engine.add("b", [4, 5], max_tokens=3)
    engine.step()
    assert engine.executor.plans[-1].request_ids == ("a", "b")
    engine.run()


def test_a_request_that_was_in_flight_during_lost_engines_runs_alone_first() -> None:
    """Its grammar is compiled when it may run. Siblings and requests of a higher priority wait, and none is forgotten."""
    engine = MockEngine(depth=2, policy="priority", max_num_seqs=8)
    engine.add("early", [5] * 9, 12, priority=3)
    engine.step()
    for name, leader in (("c0", None), ("c1", "c0"), ("c2", "c0")):
        engine.add(name, [1] * 9, 6, priority=2, leader=leader, grammar="3", num_losses=MAX_FAULTS)
    engine.add("other", [2] * 9, 6, grammar="4")
    engine.add("plain", [3] * 9, 6)
    seen: list[set[str]] = []
    for _ in range(2000):
        if engine.scheduler.suspects.alone is None:
            break
        engine.step()
        in_flight = {each for plan, _ in engine.core._in_flight for each in plan.request_ids}
        if engine.scheduler.suspects.lone is not None and in_flight:
            seen.append(in_flight)
            assert in_flight == {engine.scheduler.suspects.lone.request_id}
            assert engine.scheduler._grammars.num_compiling <= 1
    assert {name for names in seen for name in names} == {"c0", "c1", "c2"}
    engine.run()


def test_a_request_whose_decodes_fail_is_the_cause_although_its_prompts_succeed() -> None:
    engine = MockEngine(fault_tolerance=True)
    execute = engine.worker.execute_model

    def execute_model(plan: SchedulerOutput) -> ModelRunnerOutput:
        if "bad" in plan.request_ids and "bad" not in {new.request_id for new in plan.new_requests}:
            raise StepError("its decode fails", rank=0, step_id=plan.step_id)
        return execute(plan)

    engine.worker.execute_model = execute_model  # type: ignore[method-assign]
    engine.add("bad", [1] * 9, 40)
    engine.add("good", [2] * 9, 40)
    engine.run()
    assert (engine.finished["bad"], engine.finished["good"]) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert len(engine.executor.recoveries) == MAX_FAULTS + 1
