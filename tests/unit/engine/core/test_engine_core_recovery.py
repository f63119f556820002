"""`EngineCore` after a recovery: requests go on from their tokens, and a request that always fails ends alone."""

from __future__ import annotations

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.core.step_loop import CoreListener
from inflight.errors import RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.interface.request import MAX_FAULTS, FinishReason
from inflight.interface.statistics import FaultStatus
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from tests.support.mock_engine import MockEngine
from tests.unit.engine.core.core_cases import assert_dead, fail_on


@pytest.mark.parametrize("kind", [StepError, StepTimeoutError, WorkerDiedError])
def test_after_a_recovery_every_request_goes_on_from_its_tokens(kind: type[RankError]) -> None:
    """`MockEngine` compares the tokens. The new rank's cache is empty, so a cached block would give wrong ones."""
    statuses: list[FaultStatus] = []
    begun: set[str] = set()

    class Listener(CoreListener):
        def faults_changed(self, status: FaultStatus) -> None:
            statuses.append(status)
            begun.update(*(plan.request_ids for plan in engine.executor.plans if not begun))

    engine = MockEngine(depth=2, fault_tolerance=True, listener=Listener())
    engine.lose_arenas()
    engine.add("before", [1] * 9, 2)
    while engine.core.has_unfinished_requests():
        engine.step()
    fail_on(engine, engine.executor.next_step_id + 2, kind("bad luck", rank=0, step_id=4))
    engine.add("a", [1] * 9, 12)
    engine.add("b", [2] * 5, 12, grammar="3")
    engine.run()
    assert [str(error) for error in engine.executor.recoveries] == ["bad luck"]
    assert [(status.state, status.epoch) for status in statuses] == [("recovering", 0), ("healthy", 1)]
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

    engine.executor.can_recover = False
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


def test_the_siblings_of_a_poisoned_request_end_with_it() -> None:
    """Otherwise each of the n sequences would cost one more recovery, and the server has only `max_recoveries`."""
    engine = MockEngine(depth=2, fault_tolerance=True, max_num_seqs=8)
    names = ["bad", *(f"sibling {i}" for i in range(4))]
    poisons = [Poison(engine, name, 7) for name in names]
    engine.add("good", [3] * 5, 15)
    for name in names:
        engine.add(name, [7] * 5, 15, leader=None if name == "bad" else "bad")
    engine.run()
    assert {engine.finished[name] for name in names} == {FinishReason.ERROR}
    assert engine.finished["good"] is FinishReason.LENGTH
    assert sum(len(poison.failed) for poison in poisons) == 4


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
        if engine.scheduler.quarantine.alone is None:
            break
        engine.step()
        in_flight = {each for plan, _ in engine.core._in_flight for each in plan.request_ids}
        if engine.scheduler.quarantine.lone is not None and in_flight:
            seen.append(in_flight)
            assert in_flight == {engine.scheduler.quarantine.lone.request_id}
            assert len(engine.scheduler._grammars.compiling) <= 1
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
