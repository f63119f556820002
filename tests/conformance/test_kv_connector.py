"""What the KV connectors of all ranks report reaches the scheduler once, in the step in which the last rank has reported it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from inflight.engine.core import EngineCore
from inflight.errors import WorkerDiedError
from inflight.executor.executor import Executor
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, ResolvedSampling
from inflight.interface.step import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from inflight.sampling_params import SamplingParams
from tests.conformance.conftest import EXECUTORS, ExecutorFactory, multiproc

NUM_STEPS = 12
LAYOUTS = {**EXECUTORS, "multiproc-pp2-tp2": ("mp", 2, 2, multiproc)}


@pytest.fixture(params=LAYOUTS)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made = ExecutorFactory(*LAYOUTS[request.param])()
    yield made
    made.shutdown()


class Recorder:
    """An engine core with one request of `NUM_STEPS` tokens; it writes down what its scheduler is told."""

    def __init__(self, executor: Executor, depth: int) -> None:
        config = replace(
            executor.config,
            cache=replace(executor.config.cache, memory_bytes=1 << 20),
            scheduler=replace(executor.config.scheduler, depth=depth),
        )
        self.core = EngineCore(config, executor)
        self.told: dict[int, KVConnectorOutput] = {}
        update = self.core.scheduler.update_from_output

        def record(plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
            assert plan.step_id not in self.told
            self.told[plan.step_id] = output.kv_connector_output
            return update(plan, output)

        self.core.scheduler.update_from_output = record  # type: ignore[method-assign]
        self.core.add_request(
            EngineCoreRequest(
                request_id="r",
                prompt_token_ids=np.array([1, 2, 3], dtype=np.int32),
                sampling=ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=NUM_STEPS),
                arrival_time=0.0,
            )
        )

    def run(self) -> None:
        while self.core.has_unfinished_requests():
            self.core.step()


def script_reports(executor: Executor, seed: int) -> dict[str, int]:
    """Each rank reports each of twenty ids in a step of its own choice; one rank keeps silent about some.

    Returns the step in which an id has been reported by all, for those that are.
    """
    rng = random.Random(seed)
    reports: dict[tuple[int, int], set[str]] = {}
    complete: dict[str, int] = {}
    for i in range(20):
        name, silent = f"id-{i}", rng.randrange(executor.world_size) if i % 5 == 0 else None
        steps = [rng.randrange(NUM_STEPS) for _ in range(executor.world_size)]
        for rank, step_id in enumerate(steps):
            if rank != silent:
                reports.setdefault((rank, step_id), set()).add(name)
        if silent is None:
            complete[name] = max(steps)
    for (rank, step_id), names in reports.items():
        executor.collective_rpc("script", (rank, step_id, "kv", (sorted(names), sorted(names), ())))
    return complete


def told_by_step(recorder: Recorder) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for step_id, output in recorder.told.items():
        assert output.finished_sending == output.finished_receiving
        for name in output.finished_sending:
            found.setdefault(name, []).append(step_id)
    return found


@pytest.mark.parametrize("depth", [1, 3])
def test_every_report_comes_once_when_the_last_rank_has_made_it(executor: Executor, depth: int) -> None:
    complete = script_reports(executor, seed=depth)
    for step_id in (2, 5, 6):  # slow, and another one each time
        executor.collective_rpc("script", (step_id % executor.world_size, step_id, "sleep", 0.05))
    recorder = Recorder(executor, depth)
    recorder.run()
    assert sorted(recorder.told) == list(range(NUM_STEPS))
    assert told_by_step(recorder) == {name: [step_id] for name, step_id in complete.items()}


@pytest.mark.parametrize("depth", [1, 3])
def test_reports_before_the_death_of_a_rank_are_told_and_none_after(executor: Executor, depth: int) -> None:
    complete = script_reports(executor, seed=7)
    executor.collective_rpc("script", (executor.world_size - 1, 6, "die", "bad luck"))
    recorder = Recorder(executor, depth)
    with pytest.raises(WorkerDiedError):
        recorder.run()
    # a death is known at once: with several steps in flight it fails those before it that are not complete
    died_in = max(recorder.told) + 1
    assert 6 - depth < died_in <= 6
    assert told_by_step(recorder) == {name: [step_id] for name, step_id in complete.items() if step_id < died_in}
