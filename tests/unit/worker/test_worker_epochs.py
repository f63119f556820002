"""The real worker in a new epoch: after a failed step all ranks meet again, and compute as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.errors import RankError
from inflight.executor.recovery import recover
from tests.support.waits import wait_until
from tests.unit.worker.driven import make_executor, workers_of, write_small_model
from tests.unit.worker.test_worker_phases import greedy_job, num_events, plan_ahead, submit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("epochs"))


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
def test_a_new_epoch_forgets_the_steps_of_the_old_one(folder: Path, layout: tuple[int, int]) -> None:
    driven = make_executor(folder, *layout, 3)
    truth = greedy_job("truth")
    plan_ahead(driven, [truth]).run()
    workers = workers_of(driven)
    last = workers[-1]
    execute, warm_up, failing = last.runner.execute_model, last.runner.warm_up, True
    warmed_up: list[bool] = []

    def fail_once(model_input: Any, received: Any) -> Any:
        nonlocal failing
        if failing and model_input.plan.request_ids == ("free",):
            failing = False
            raise RuntimeError("bad luck")
        return execute(model_input, received)

    last.runner.execute_model = fail_once  # type: ignore[method-assign]
    last.runner.warm_up = lambda: warmed_up.append(True) or warm_up()  # type: ignore[method-assign, func-returns-value]
    prepared = [num_events(worker, "prepare") for worker in workers]
    ahead = plan_ahead(driven, [greedy_job("masked", has_grammar=True)])
    (masked,) = submit(ahead, 1)
    ahead.running = []
    ahead.waiting.append(greedy_job("free"))
    (failed,) = submit(ahead, 1)
    wait_until(lambda: not failing)
    wait_until(
        lambda: all(
            num_events(worker, "prepare") >= before + 2 for worker, before in zip(workers, prepared, strict=True)
        )
    )
    ahead.send_masks()
    error = failed.exception(timeout=300)
    assert isinstance(error, RankError)
    result = recover(driven.executor, error)
    assert (result.epoch, result.replaced) == (1, ())
    assert masked.done() and warmed_up == [True]
    for worker in workers:
        assert not worker._futures and not worker._order._steps
    again = greedy_job("again")
    plan_ahead(driven, [again]).run()
    assert again.tokens[1:] == truth.tokens[1:]
    assert not worker.is_waiting() and worker.phase() == ""
    driven.executor.shutdown()


def test_what_was_done_at_the_start_is_not_done_again(folder: Path) -> None:
    """After a fault these calls come again, because other ranks may be new."""
    driven = make_executor(folder, 1, 1, 3)
    (worker,) = workers_of(driven)
    runner, config = worker.runner, worker._kv_cache_config
    assert config is not None
    measured: list[Any] = []
    warmed_up: list[bool] = []
    worker._memory.measure_available = lambda runner: measured.append(runner) or 1000  # type: ignore[method-assign, func-returns-value]
    runner.warm_up = lambda: warmed_up.append(True)  # type: ignore[method-assign]
    for _ in range(2):
        worker.load_model()
        assert worker.determine_available_memory() == 1000
        worker.initialize_from_config(config)
    assert worker.runner is runner and measured == [runner] and not warmed_up
    driven.executor.shutdown()


def test_a_rank_that_has_left_its_groups_is_not_healthy(folder: Path) -> None:
    driven = make_executor(folder, 1, 2, 3)
    worker = workers_of(driven)[0]
    worker.check_health()
    worker.leave_groups("a test wants it")
    with pytest.raises(ConnectionError, match="rank 0 has stopped its communication"):
        worker.check_health()
    driven.executor.shutdown()
