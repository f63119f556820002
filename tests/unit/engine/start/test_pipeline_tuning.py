"""What the start chooses for a pipeline, on stages and links whose time is simulated."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from inflight.config.engine import EngineConfig, SchedulerConfig
from inflight.config.speculative import resolve_speculative
from inflight.engine.start import pipeline_tuning
from inflight.engine.start.pipeline_tuning import choose_stagger, tuned
from inflight.errors import StepError
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from tests.conformance.configs import engine_config


class SimulatedPipeline:
    """An executor of stages that take `stage` seconds a step, with links of `link` seconds, in a time of its own.

    `plans`: all that was submitted.
    """

    def __init__(self, num_stages: int, stage: float, link: float) -> None:
        self.now = 0.0
        self.plans: list[SchedulerOutput] = []
        self._stage, self._link = stage, link
        self._free_at = [0.0] * num_stages
        self._token_at: dict[int, float] = {}  # of each slot, on the first stage
        self._lengths: dict[int, int] = {}  # of each slot, in tokens

    def execute_model(self, plan: SchedulerOutput, non_block: bool) -> Future[ModelRunnerOutput]:
        assert non_block
        self.plans.append(plan)
        new = {data.slot for data in plan.new_requests}
        slots: list[int] = plan.slots.tolist()
        at = max([self.now, *(self._token_at[slot] for slot in slots if slot not in new)])
        for index, free_at in enumerate(self._free_at):
            at = max(at + self._link * (index > 0), free_at) + self._stage
            self._free_at[index] = at
        self._token_at.update(dict.fromkeys(slots, at + self._link))
        future: Any = SimpleNamespace(result=lambda: self._end(plan, at))
        return future

    def _end(self, plan: SchedulerOutput, at: float) -> ModelRunnerOutput:
        self.now = max(self.now, at)
        self._lengths |= {data.slot: len(data.token_ids) for data in plan.new_requests}
        slots: list[int] = plan.slots[plan.samples].tolist()
        positions = np.array([self._lengths[slot] for slot in slots], dtype=np.int32)
        self._lengths |= {slot: self._lengths[slot] + 1 for slot in slots}  # no draft is accepted
        return ModelRunnerOutput(
            step_id=plan.step_id,
            sampled_token_ids=np.full(len(slots), 7, dtype=np.int32),
            num_sampled_tokens=np.ones(len(slots), dtype=np.int32),
            sampled_positions=positions,
        )


SPEC = KVCacheSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32", itemsize=4)
CACHE = KVCacheConfig(
    num_blocks=400, block_bytes=SPEC.block_bytes, groups=(KVCacheGroup(layer_names=("layer",), spec=SPEC),)
)


def pipeline_config(num_stages: int, max_num_seqs: int = 64, **scheduler: Any) -> EngineConfig:
    config = engine_config(pipeline_parallel_size=num_stages, backend="mp")
    return replace(
        config,
        model=replace(config.model, max_model_len=256),
        scheduler=SchedulerConfig(
            **{
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": 64,
                "enable_chunked_prefill": True,
                "policy": "priority",
                "depth": num_stages + 1,
                "stagger": num_stages,
                "max_stagger": 3 * num_stages,
                **scheduler,
            }
        ),
    )


def tune(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, pipeline: SimulatedPipeline, num_blocks: int = 400
) -> tuple[SchedulerConfig, int]:
    # the clock of this module only: threads that earlier tests have left keep theirs
    monkeypatch.setattr(pipeline_tuning, "time", SimpleNamespace(perf_counter=lambda: pipeline.now))
    return tuned(config, cast("Any", pipeline), replace(CACHE, num_blocks=num_blocks))


@pytest.mark.parametrize(
    ("num_stages", "stage", "link", "stagger"),
    [
        (2, 0.020, 0.0, 2),
        (2, 0.020, 0.010, 3),
        (4, 0.020, 0.0, 4),
        (4, 0.020, 0.010, 6),
        (2, 0.020, 0.001, 2),  # 2.1 of a stage: a step of 1.05 is near enough
        (3, 0.002, 0.020, 9),  # more than the engine has room for
        (2, 1.0, 0.010, 2),
    ],
)
def test_the_stages_are_kept_busy(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, stage: float, link: float, stagger: int
) -> None:
    config = pipeline_config(num_stages)
    chosen, _ = tune(monkeypatch, config, SimulatedPipeline(num_stages, stage, link))
    assert (chosen.stagger, chosen.depth) == (stagger, stagger + 1)
    assert replace(chosen, stagger=num_stages, depth=num_stages + 1) == config.scheduler  # all else is the user's
    assert chosen.max_depth == config.scheduler.max_depth  # what rings and masks were made for


def test_what_was_measured_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="inflight"):
        tune(monkeypatch, pipeline_config(2), SimulatedPipeline(2, 0.020, 0.010))
    (record,) = caplog.records
    assert (
        "a token's way through all stages and back takes 60.00 ms, and the slowest stage takes 20.00 ms: stagger 3, 4 steps in"
        in (record.getMessage())
    )


def test_numbers_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = SimulatedPipeline(2, 0.020, 0.010)
    fixed = pipeline_config(2, stagger=2, depth=3, max_stagger=None)
    assert tune(monkeypatch, fixed, pipeline) == (fixed.scheduler, 0)
    assert pipeline.plans == []
    deep = pipeline_config(2, depth=5, max_stagger=4)  # pipeline_depth=5
    chosen, _ = tune(monkeypatch, deep, pipeline)
    assert (chosen.stagger, chosen.depth) == (3, 5)


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step ids rise without a gap over both measurements, and the engine goes on behind them; a slot that is used again
    travels in full."""
    pipeline = SimulatedPipeline(2, 0.020, 0.010)
    _, first_step_id = tune(monkeypatch, pipeline_config(2), pipeline)
    assert [plan.step_id for plan in pipeline.plans] == list(range(first_step_id))
    rows = [len(plan.slots) for plan in pipeline.plans]
    assert set(rows) == {8}


@pytest.mark.parametrize(("max_num_seqs", "num_blocks"), [(1, 400), (5, 400), (64, 3), (64, 40)])
def test_a_small_engine_is_measured_too(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, num_blocks: int) -> None:
    chosen, _ = tune(monkeypatch, pipeline_config(2, max_num_seqs), SimulatedPipeline(2, 0.020, 0.010), num_blocks)
    assert 2 <= chosen.stagger <= 6


def test_a_model_of_few_tokens_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pipeline_config(2)
    config = replace(config, model=replace(config.model, max_model_len=8))
    pipeline = SimulatedPipeline(2, 0.020, 0.010)
    assert tune(monkeypatch, config, pipeline) == (config.scheduler, 0)
    assert pipeline.plans == []


def test_drafts_are_planned_as_later(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(
        pipeline_config(2), speculative=resolve_speculative({"method": "ngram", "num_speculative_tokens": 3})
    )
    chosen, _ = tune(monkeypatch, config, SimulatedPipeline(2, 0.020, 0.010))
    assert chosen.stagger == 3


def test_a_step_that_fails_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = SimulatedPipeline(2, 0.020, 0.010)

    def fail(plan: SchedulerOutput, at: float) -> ModelRunnerOutput:
        raise StepError("bad luck", rank=1, step_id=plan.step_id, request_ids=plan.request_ids, worker_traceback="")

    monkeypatch.setattr(pipeline, "_end", fail)
    with pytest.raises(StepError, match="bad luck"):
        tune(monkeypatch, pipeline_config(2), pipeline)


def test_the_smallest_stagger_within_the_tolerance() -> None:
    assert choose_stagger(6.0, 2.0, lowest=2, highest=6) == 3
    assert choose_stagger(6.5, 2.0, lowest=2, highest=6) == 3
    assert choose_stagger(6.7, 2.0, lowest=2, highest=6) == 4  # 3 would take 2.23, 1.12 of a stage
    assert choose_stagger(1.0, 2.0, lowest=2, highest=6) == 2
    assert choose_stagger(60.0, 2.0, lowest=2, highest=6) == 6
