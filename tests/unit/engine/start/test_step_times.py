"""The steps that are measured at the start, and what is made of their times."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.config.engine import EngineConfig
from inflight.engine.start.step_times import UNKNOWN_SECONDS, measured_step_times
from inflight.executor.executor import Executor
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.scheduler.step_time.load import StepLoad
from inflight.scheduler.step_time.model import StepTimeModel
from tests.conformance.configs import engine_config
from tests.support.mock_engine import MAX_MODEL_LEN, MockEngine


class Measured:
    """An engine that starts. Its first step needs 9 s. After that, a step needs 1 s and 0.1 s for each token."""

    def __init__(self, engine: MockEngine, **limits: Any) -> None:
        self.plans: list[SchedulerOutput] = []
        self.worker, self.kv_cache_config = engine.worker, engine.core.kv_cache_config
        config, scheduler = engine_config(), engine.scheduler._config
        scheduler = replace(scheduler, **{"target_seconds": None, "max_step_seconds": 1.0, **limits})
        self.config = replace(config, model=replace(config.model, max_model_len=MAX_MODEL_LEN), scheduler=scheduler)
        self.is_measured = True

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        seconds = 9.0 if len(self.plans) == 1 else 1.0 + 0.1 * plan.num_tokens
        return replace(self.worker.execute_model(plan), compute_seconds=seconds if self.is_measured else 0.0)

    def start(
        self, first_step_id: int, kv_cache_config: KVCacheConfig | None = None
    ) -> tuple[StepTimeModel | None, int]:
        executor = cast("Executor", SimpleNamespace(execute_model=self.execute_model))
        config = cast("EngineConfig", self.config)
        return measured_step_times(config, executor, kv_cache_config or self.kv_cache_config, first_step_id)


def prompt(num_tokens: int) -> StepLoad:
    load = StepLoad()
    load.add_prompt(0, num_tokens, draws=True)
    return load


def test_the_first_step_is_left_out_and_the_others_are_predicted() -> None:
    measured = Measured(MockEngine(max_num_batched_tokens=64))
    times, next_step_id = measured.start(5)
    # 128 tokens would not fit into the context, which must also hold the drawn token
    assert [plan.num_tokens for plan in measured.plans] == [1, 1, 16, MAX_MODEL_LEN - 1]
    assert [plan.step_id for plan in measured.plans] == [5, 6, 7, 8]
    assert next_step_id == 9
    assert all(plan.samples.tolist() == [True] for plan in measured.plans)
    assert times is not None
    assert times.seconds(prompt(1)) == pytest.approx(1.1, rel=0.15)
    assert times.seconds(prompt(16)) == pytest.approx(2.6, rel=0.1)
    assert times.slowdown == 1.0


def test_the_measured_tokens_differ() -> None:
    """Equal ones would choose the same experts."""
    measured = Measured(MockEngine(max_num_batched_tokens=64))
    measured.start(0)
    assert len(set(measured.plans[2].new_requests[0].token_ids.tolist())) == 16


def test_without_a_limit_nothing_is_measured() -> None:
    infinite = float("inf")
    measured = Measured(MockEngine(), target_seconds=infinite, max_step_seconds=infinite)
    assert measured.start(5) == (None, 5)
    assert measured.plans == []
    for limits in ({"target_seconds": 0.1}, {"max_step_seconds": 1.0}):
        measured = Measured(MockEngine(), **{"target_seconds": infinite, "max_step_seconds": infinite, **limits})
        assert measured.start(0)[0] is not None


@pytest.mark.parametrize(
    ("num_batched", "num_blocks", "windows", "sizes"),
    [
        (10, 100, (None,), [10, 10]),  # a step has room for 10 tokens
        (64, 1 + 5, (None,), [16, 19]),  # the cache has 5 blocks of 4 tokens; the drawn token has no room otherwise
        (64, 1 + 8, (None, 8), [15, 15]),  # each of two groups has half of the blocks
        (64, 1 + 1, (None,), [3, 3]),
    ],
)
def test_a_measured_prompt_fits(
    num_batched: int, num_blocks: int, windows: tuple[int | None, ...], sizes: list[int]
) -> None:
    measured = Measured(MockEngine(windows=windows, max_num_batched_tokens=num_batched, extra_blocks=100))
    measured.start(0, replace(measured.kv_cache_config, num_blocks=num_blocks))
    assert [plan.num_tokens for plan in measured.plans[2:]] == sizes


def test_a_worker_that_measures_no_times_still_gives_a_model() -> None:
    measured = Measured(MockEngine())
    measured.is_measured = False
    times, _ = measured.start(0)
    assert times is not None
    assert times.seconds(prompt(1)) == pytest.approx(UNKNOWN_SECONDS, rel=0.1)
