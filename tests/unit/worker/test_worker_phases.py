"""The phases of the real worker's steps: who waits for whom, what is copied out while later steps run, and how errors end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import EngineClosedError, StepError
from inflight.interface.request import ResolvedSampling
from inflight.sampling_params import SamplingParams
from tests.support.waits import wait_until
from tests.unit.worker.driven import Driven, make_executor, planner, workers_of, write_small_model
from tests.unit.worker.plan_ahead import Job, PlanAhead


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("phases"))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("inflight-")]


def greedy_job(name: str, *, max_tokens: int = 9, has_grammar: bool = False) -> Job:
    sampling = ResolvedSampling(params=SamplingParams(temperature=0.0), seed=0, max_tokens=max_tokens)
    return Job(name, [3], sampling, has_grammar=has_grammar)


def submit(ahead: PlanAhead, num_steps: int) -> list[Any]:
    """Steps that all draw a token for each request that is in them."""
    futures = []
    for _ in range(num_steps):
        rows = next(filter(None, (ahead.choose() for _ in range(100))))
        futures.append(ahead.submit(rows).future)
    return futures


def plan_ahead(driven: Driven, jobs: list[Job]) -> PlanAhead:
    ahead = planner(driven, jobs, depth=3, num_slots=3, max_chunk=5, seed=1)
    ahead.preemption_rate = 0.0
    return ahead


def num_events(worker: Any, phase: str) -> int:
    return sum(event.phase == phase for event in worker.timeline_events())


def test_prepare_does_not_wait_for_the_step_before(folder: Path) -> None:
    """With the compute thread held up, three steps are taken in all the same."""
    driven, go_on = make_executor(folder, 1, 2, 3), threading.Event()
    workers = workers_of(driven)
    execute = workers[0].runner.execute_model

    def held(*arguments: Any) -> Any:
        go_on.wait(300)
        return execute(*arguments)

    workers[0].runner.execute_model = held  # type: ignore[method-assign]
    futures = submit(plan_ahead(driven, [greedy_job("r")]), 3)
    for worker in workers:
        wait_until(lambda worker=worker: num_events(worker, "prepare") == 3)
    assert not any(future.done() for future in futures)
    assert driven.executor._ranks[0].loop.activity.startswith("running steps 0, 1, 2")
    go_on.set()
    for future in futures:
        future.result(timeout=300)
    driven.executor.shutdown()


def test_steps_run_on_while_their_answers_are_held_up(folder: Path) -> None:
    """The compute thread does not wait for the drain thread, and later steps leave what it reads alone."""
    driven, go_on = make_executor(folder, 1, 1, 3), threading.Event()
    truth = greedy_job("truth", max_tokens=4)
    plan_ahead(driven, [truth]).run()
    (worker,) = workers_of(driven)
    drain = worker.runner.drain

    def held(drawn: Any) -> Any:
        go_on.wait(300)
        return drain(drawn)

    worker.runner.drain = held  # type: ignore[method-assign]
    before = num_events(worker, "sample")
    futures = submit(plan_ahead(driven, [greedy_job("r", max_tokens=4)]), 4)
    wait_until(lambda: num_events(worker, "sample") == before + 4)
    assert not any(future.done() for future in futures)
    go_on.set()
    drawn = [future.result(timeout=300).sampled_token_ids.tolist() for future in futures]
    assert drawn == [[token] for token in truth.tokens[1:]]
    driven.executor.shutdown()


def test_a_late_mask_does_not_hold_up_forwards_without_it(folder: Path) -> None:
    driven = make_executor(folder, 1, 1, 3)
    ahead = plan_ahead(driven, [greedy_job("masked", has_grammar=True)])
    futures = submit(ahead, 1)
    (masked,) = ahead.running
    ahead.running = []
    ahead.waiting.append(greedy_job("free"))
    futures += submit(ahead, 1)
    (worker,) = workers_of(driven)
    wait_until(lambda: num_events(worker, "forward") == 2)
    ahead.running.append(masked)
    futures += submit(ahead, 1)
    assert [future.done() for future in futures] == [False] * 3
    assert num_events(worker, "sample") == 0
    while ahead.in_flight:
        ahead.commit()
    wait_until(lambda: num_events(worker, "sample") == 3)
    assert num_events(worker, "forward") == num_events(worker, "sample") == 3
    driven.executor.shutdown()


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
def test_a_forward_that_fails_behind_a_step_without_its_masks(folder: Path, layout: tuple[int, int]) -> None:
    """Everything ends: without others the older step as if nothing had been; those of its stage leave the step at once."""
    driven = make_executor(folder, *layout, 3)
    worker = workers_of(driven)[-1]
    execute = worker.runner.execute_model

    def failing(model_input: Any, received: Any) -> Any:
        if model_input.plan.step_id == 1:
            raise RuntimeError("bad luck")
        return execute(model_input, received)

    worker.runner.execute_model = failing  # type: ignore[method-assign]
    ahead = plan_ahead(driven, [greedy_job("masked", has_grammar=True)])
    (first,) = submit(ahead, 1)
    ahead.running = []
    ahead.waiting.append(greedy_job("free"))
    (second,) = submit(ahead, 1)
    wait_until(lambda: num_events(worker, "prepare") == 2)
    ahead.send_masks()
    # Which rank of several reports first, and whether it has left the group by then, is left to chance.
    left = "failed on it|has stopped its communication"
    if layout[0] == 1:
        assert len(first.result(timeout=300).sampled_token_ids) == 1
    else:
        with pytest.raises(StepError, match=left):
            first.result(timeout=300)
    with pytest.raises(StepError, match="bad luck" if layout == (1, 1) else f"bad luck|{left}"):
        second.result(timeout=300)
    driven.executor.shutdown()


@pytest.mark.parametrize("phase", ["prepare_inputs", "execute_model", "sample"])
def test_no_step_runs_after_one_that_failed(folder: Path, phase: str) -> None:
    """A later step would lack what the failed one brought (blocks, tokens), and write to blocks that now belong to others."""
    driven = make_executor(folder, 1, 1, 3)
    (worker,) = workers_of(driven)
    original, execute, ran = getattr(worker.runner, phase), worker.runner.execute_model, []

    def failing(step: Any, *arguments: Any) -> Any:
        if getattr(step, "plan", step).step_id == 1:
            raise RuntimeError("bad luck")
        return original(step, *arguments)

    def noted(model_input: Any, received: Any) -> Any:
        ran.append(model_input.plan.step_id)
        return execute(model_input, received)

    worker.runner.execute_model = noted  # type: ignore[method-assign]
    if phase == "execute_model":
        execute = failing
    else:
        setattr(worker.runner, phase, failing)
    futures = submit(plan_ahead(driven, [greedy_job("r")]), 3)
    assert len(futures[0].result(timeout=300).sampled_token_ids) == 1
    for future in futures[1:]:
        with pytest.raises(StepError):
            future.result(timeout=300)
    assert ran == ([0] if phase == "prepare_inputs" else [0, 1])
    driven.executor.check_health()  # without fault tolerance, the engine goes on after this call
    truth = greedy_job("truth", max_tokens=4)
    plan_ahead(driven, [truth]).run()
    assert len(truth.tokens) == 5
    driven.executor.shutdown()


def test_masks_that_never_come_do_not_hold_up_the_end(folder: Path) -> None:
    driven = make_executor(folder, 2, 2, 3)
    futures = submit(plan_ahead(driven, [greedy_job("masked", has_grammar=True), greedy_job("free")]), 2)
    wait_until(lambda: all(num_events(worker, "prepare") == 2 for worker in workers_of(driven)))
    held = [future for worker in workers_of(driven) for future in worker._futures]
    driven.executor.shutdown()
    assert all(future.done() for future in held)
    for future in futures:
        with pytest.raises(EngineClosedError):
            future.result(timeout=300)
