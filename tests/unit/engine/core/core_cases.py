"""Steps of a `MockEngine`, and steps that fail, for the tests of `EngineCore`."""

from __future__ import annotations

from functools import partial

import pytest

from inflight.errors import EngineDeadError, StepError
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from tests.support.mock_engine import MockEngine


def step(engine: MockEngine) -> None:
    """One step; one that fails leaves nothing in flight."""
    oldest = engine.core._in_flight[0][0].step_id if engine.core._in_flight else engine.executor.next_step_id
    try:
        engine.step()
    except StepError:
        assert oldest in engine.executor.failing and not engine.core._in_flight


def fail_on(engine: MockEngine, step_id: int, error: Exception) -> None:
    """Whatever the step computes, this is its answer."""
    run = engine.worker.execute_model

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
        if plan.step_id == step_id:
            engine.worker.apply(plan)
            raise error
        return run(plan)

    engine.worker.execute_model = execute  # type: ignore[method-assign, assignment]


def assert_dead(engine: MockEngine, cause: str) -> None:
    assert engine.core.is_dead
    for call in (engine.core.step, partial(engine.core.collective_rpc, "echo"), engine.core.check_alive):
        with pytest.raises(EngineDeadError, match=f"the engine has failed; .*{cause}") as caught:
            call()
        assert caught.value.summary
    engine.scheduler.check_integrity()
    engine.grammars.close()
