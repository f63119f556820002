"""What every executor promises when ranks raise, are slow, are silent or die."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.errors import EngineError, RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.executor import recovery
from inflight.executor.executor import Executor
from inflight.interface.messages import StepReply
from inflight.interface.step import ModelRunnerOutput
from tests.conformance.configs import kv_cache_config, plan
from tests.conformance.conftest import ExecutorFactory
from tests.support.enough_time import with_enough_time
from tests.support.waits import wait_until

# -- exceptions ------------------------------------------------------------------------------------------------


def test_an_exception_reaches_its_own_future(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    rank = executor_factory.last_rank
    executor.collective_rpc("script", (rank, 1, "raise", "bad luck"))
    futures = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(3)]
    error = futures[1].exception(timeout=300)
    assert isinstance(error, StepError)
    assert f"failed on rank {rank}: RuntimeError: bad luck" in str(error)
    assert (error.rank, error.step_id, error.request_ids) == (rank, 1, ("req-a", "req-b"))
    assert "Traceback" in error.worker_traceback
    assert "in execute_model" in error.worker_traceback
    assert futures[0].result(timeout=300).step_id == 0
    assert futures[2].result(timeout=300).step_id == 2


def test_an_exception_does_not_wait_for_the_other_ranks(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    """They may be in a collective that the failed rank has left: their silence must not hide the reason."""
    executor = executor_factory()
    release = tmp_path / "release"
    executor.collective_rpc("script", (0, 0, "raise", "the reason"))
    for rank in range(1, executor.world_size):
        executor.collective_rpc("script", (rank, 0, "hold", str(release)))
    with pytest.raises(StepError, match="the reason"):
        executor.execute_model(plan(0), non_block=True).result(timeout=300)
    release.touch()
    assert executor.execute_model(plan(1)).step_id == 1


# -- slow and silent ranks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def held(executor: Executor, rank: int | None, step_id: int, release: Path) -> Iterator[None]:
    """The rank (None: all ranks) waits in this step until `release` is there: at the latest at the end, also if the test has
    failed or is skipped. Otherwise a rank that is a thread would stay, and tests/conftest.py would wait for it."""
    executor.collective_rpc("script", (rank, step_id, "hold", str(release)))
    try:
        yield
    finally:
        release.touch()


def test_a_timeout_names_rank_step_and_requests(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    rank = executor_factory.last_rank

    def check(budget: float) -> None:
        executor, release = executor_factory(budget=budget), tmp_path / f"release-{budget}"
        with held(executor, rank, 4, release), pytest.raises(StepTimeoutError) as caught:
            executor.execute_model(plan(4))
        error = caught.value
        assert (error.rank, error.step_id, error.request_ids) == (rank, 4, ("req-a", "req-b"))
        assert f"step 4 (requests: req-a, req-b) had no reply within {budget:g} s from rank {rank}" in str(error)

    with_enough_time(check)


def test_a_timeout_names_all_silent_ranks(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    executor = executor_factory(budget=0.1)
    release = tmp_path / "release"
    executor.collective_rpc("script", (None, 0, "hold", str(release)))
    with pytest.raises(StepTimeoutError) as caught:
        executor.execute_model(plan(0))
    release.touch()
    assert all(f"rank {rank}" in str(caught.value) for rank in range(executor.world_size))


def test_a_late_reply_answers_no_other_step(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    def check(budget: float, slow_rank: int) -> None:
        executor, release = executor_factory(budget=budget), tmp_path / f"release-{slow_rank}-{budget}"
        with held(executor, slow_rank, 0, release), pytest.raises(StepTimeoutError):
            executor.execute_model(plan(0))
        for step_id in (1, 2):
            output = executor.execute_model(plan(step_id))
            assert output.step_id == step_id
            assert output.sampled_token_ids.tolist() == [1000 * step_id + executor.output_rank]

    for slow_rank in range(executor_factory.world_size):
        with_enough_time(partial(check, slow_rank=slow_rank))


def test_the_budget_of_a_step_starts_when_the_one_before_ends(executor_factory: ExecutorFactory) -> None:
    def check(budget: float) -> None:
        executor = executor_factory(budget=budget)
        for step_id in range(3):
            executor.collective_rpc("script", (None, step_id, "sleep", 0.55 * budget))
        futures = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(3)]
        assert [future.result(timeout=300).step_id for future in futures] == [0, 1, 2]

    with_enough_time(check)


def test_every_step_behind_a_silent_rank_times_out(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    executor = executor_factory(budget=0.05)
    release = tmp_path / "release"
    executor.collective_rpc("script", (0, 0, "hold", str(release)))
    start = time.monotonic()
    for future in [executor.execute_model(plan(step_id), non_block=True) for step_id in range(3)]:
        with pytest.raises(StepTimeoutError):
            future.result(timeout=300)
    assert 0.14 < time.monotonic() - start < 60
    release.touch()


def test_check_health_and_dummy_batches_have_the_budget_of_a_step(
    executor_factory: ExecutorFactory, tmp_path: Path
) -> None:
    executor = executor_factory(budget=0.05)
    release = tmp_path / "release"
    executor.collective_rpc("hold", (executor_factory.last_rank, str(release)), non_block=True)
    with pytest.raises(StepTimeoutError, match="check_health"):
        executor.check_health()
    with pytest.raises(StepTimeoutError, match="execute_dummy_batch"):
        executor.collective_rpc("execute_dummy_batch", timeout=executor._step_budget)
    release.touch()


# -- replies out of place ----------------------------------------------------------------------------------------


def forged(step_id: int, token: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(step_id=step_id, sampled_token_ids=np.array([token], dtype=np.int32))


def deliver_to_all(executor: Executor, reply: StepReply) -> None:
    for rank in range(executor.world_size):
        executor._deliver(replace(reply, rank=rank))


def test_a_reply_of_another_epoch_is_dropped(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    executor = executor_factory()
    release = tmp_path / "release"
    executor.collective_rpc("script", (None, 0, "hold", str(release)))
    future = executor.execute_model(plan(0), non_block=True)
    deliver_to_all(executor, StepReply(epoch=-1, step_id=0, rank=0, output=forged(0, 666)))
    assert not future.done()
    release.touch()
    output = future.result(timeout=300)
    assert output.sampled_token_ids.tolist() == [executor.output_rank]


def test_a_reply_to_a_step_that_has_ended_is_dropped(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    executor.execute_model(plan(0))
    deliver_to_all(executor, StepReply(epoch=0, step_id=0, rank=0, output=forged(0, 666)))
    assert executor.execute_model(plan(1)).sampled_token_ids.tolist() == [1000 + executor.output_rank]


# -- dead ranks --------------------------------------------------------------------------------------------------


def test_a_death_fails_what_waits_for_the_rank(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    rank = executor_factory.last_rank
    executor.collective_rpc("script", (rank, 1, "die", "out of memory"))
    futures = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(3)]
    call = executor.collective_rpc("echo", non_block=True)
    assert futures[0].result(timeout=300).step_id == 0  # it had been answered
    for future in (*futures[1:], call):
        error = future.exception(timeout=300)
        assert isinstance(error, WorkerDiedError)
        assert error.rank == rank
    assert "step 1 (requests: req-a, req-b)" in str(futures[1].exception())
    assert futures[2].exception().step_id == 2  # type: ignore[union-attr]


def test_after_a_death_everything_is_refused(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    rank = executor_factory.last_rank
    with pytest.raises(WorkerDiedError, match=f"rank {rank}"):
        executor.collective_rpc("die", (rank, "out of memory"))
    with pytest.raises(WorkerDiedError, match=f"rank {rank} is gone"):
        executor.execute_model(plan(0))
    with pytest.raises(WorkerDiedError, match=r"step 1 .*is gone"):
        executor.execute_model(plan(1), non_block=True).result(timeout=300)
    with pytest.raises(WorkerDiedError, match="'echo'"):
        executor.collective_rpc("echo")
    with pytest.raises(WorkerDiedError, match="check_health"):
        executor.check_health()
    executor.shutdown()
    with pytest.raises(EngineError):
        executor.check_health()


def test_a_death_spares_a_call_that_does_not_wait_for_the_rank(
    executor_factory: ExecutorFactory, tmp_path: Path
) -> None:
    executor = executor_factory()
    last = executor_factory.last_rank
    if last == 0:
        pytest.skip("needs two ranks")
    release = tmp_path / "release"
    wanted = executor.collective_rpc("hold", (last, str(release)), unique_reply_rank=last, non_block=True)
    death = executor.collective_rpc("die", (0, "out of memory"), non_block=True)
    assert isinstance(death.exception(timeout=300), WorkerDiedError)
    release.touch()
    assert wanted.result(timeout=300) == last


# -- recovery ----------------------------------------------------------------------------------------------------


def assert_serves(executor: Executor, step_id: int) -> None:
    """Every rank answers in the present epoch, and has its KV cache."""
    assert executor.execute_model(plan(step_id)).sampled_token_ids.tolist() == [1000 * step_id + executor.output_rank]
    for rank, calls in enumerate(executor.collective_rpc("calls")):
        assert "initialize_from_config(4)" in calls, rank


def started(executor_factory: ExecutorFactory, **options: Any) -> Executor:
    executor = executor_factory(**options)
    executor.initialize_from_config([kv_cache_config(4)] * executor.world_size)
    return executor


def error_of(future: Future[Any]) -> RankError:
    error = future.exception(timeout=300)
    assert isinstance(error, RankError)
    return error


def recover(executor: Executor, error: RankError, replaced: tuple[int, ...]) -> None:
    """Recover, if this executor can; otherwise it raises the error, and the test ends."""
    if not executor.can_recover:
        with pytest.raises(type(error)):
            recovery.recover(executor, error)
        pytest.skip("an external launcher starts the ranks")
    epoch = executor.meeting.epoch
    result = recovery.recover(executor, error)
    assert (result.epoch, result.replaced, result.kept_arenas) == (epoch + 1, replaced, not replaced)


def test_a_failed_step_keeps_all_ranks(executor_factory: ExecutorFactory) -> None:
    executor = started(executor_factory)
    rank = executor_factory.last_rank
    executor.collective_rpc("note", (None, "survived"))
    executor.collective_rpc("script", (rank, 0, "raise", "bad luck"))
    recover(executor, error_of(executor.execute_model(plan(0), non_block=True)), ())
    assert_serves(executor, 1)
    assert all("survived" in calls for calls in executor.collective_rpc("calls"))


def test_a_dead_rank_is_replaced_and_the_others_stay(executor_factory: ExecutorFactory) -> None:
    for rank in {0, executor_factory.last_rank}:
        executor = started(executor_factory)
        executor.collective_rpc("note", (None, "survived"))
        executor.collective_rpc("script", (rank, 0, "die", "out of memory"))
        futures = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(2)]
        recover(executor, error_of(futures[0]), (rank,))
        assert_serves(executor, 2)
        for each, calls in enumerate(executor.collective_rpc("calls")):
            assert ("survived" in calls) == (each != rank)


def test_all_ranks_may_die_at_once(executor_factory: ExecutorFactory) -> None:
    executor = started(executor_factory)
    executor.collective_rpc("script", (None, 0, "die", "out of memory"))
    error = error_of(executor.execute_model(plan(0), non_block=True))
    wait_until(lambda: len(executor._table._dead_ranks) == executor.world_size)
    recover(executor, error, tuple(range(executor.world_size)))
    assert_serves(executor, 1)


def test_a_rank_that_does_not_become_idle_is_replaced(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    rank = executor_factory.last_rank

    def check(budget: float) -> None:
        executor, release = started(executor_factory, budget=budget), tmp_path / f"release-{budget}"
        with held(executor, rank, 0, release):
            error = error_of(executor.execute_model(plan(0), non_block=True))
            assert isinstance(error, StepTimeoutError)
            recover(executor, error, (rank,))
        assert_serves(executor, 1)

    with_enough_time(check)


def test_a_rank_in_a_long_step_is_not_replaced(executor_factory: ExecutorFactory) -> None:
    """An idle survivor may take 1 s; one that computes, a fifth of the 100 s that its step may take."""
    executor = started(executor_factory, budget=100.0)
    if executor.world_size == 1:
        pytest.skip("needs two ranks")
    executor.collective_rpc("script", (0, 0, "sleep", 1.3))
    executor.collective_rpc("script", (executor_factory.last_rank, 0, "raise", "bad luck"))
    recover(executor, error_of(executor.execute_model(plan(0), non_block=True, budget=100.0)), ())
    assert_serves(executor, 1)


def test_commands_and_replies_of_an_older_epoch_are_dropped_and_counted(
    executor_factory: ExecutorFactory, tmp_path: Path
) -> None:

    def check(budget: float) -> None:
        executor, release = started(executor_factory, budget=budget), tmp_path / f"release-{budget}"
        with held(executor, None, 0, release):
            futures = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(3)]
            call = executor.collective_rpc("note", (None, "too late"), non_block=True)
            error = error_of(futures[0])
            # not at once: otherwise a rank could run the rest before the epoch begins
            release_later = threading.Timer(0.2, release.touch)
            release_later.start()
            recover(executor, error, ())
            release_later.join()
        for future in (*futures[1:], call):
            assert isinstance(future.exception(timeout=0), RankError)
        assert all("too late" not in calls for calls in executor.collective_rpc("calls"))
        deliver_to_all(executor, StepReply(epoch=0, step_id=3, rank=0, output=forged(3, 666)))
        assert_serves(executor, 3)
        # on each rank: two steps and the call, or their replies; and the forged replies
        assert executor.num_stale_frames >= 4 * executor.world_size

    with_enough_time(check)


def test_a_call_beside_the_steps_fails_with_its_epoch(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    executor, release = started(executor_factory), tmp_path / "release"
    if not executor.can_recover:
        pytest.skip("an external launcher starts the ranks")
    executor.collective_rpc("script", (0, 0, "raise", "this step fails"))
    begun = executor.collective_rpc("begin", (None, str(release)), non_block=True, beside=True)
    recover(executor, error_of(executor.execute_model(plan(0), non_block=True)), ())
    assert isinstance(begun.exception(timeout=0), RankError)
    again = executor.collective_rpc("begin", (None, str(release)), non_block=True, beside=True)
    release.touch()  # the late answers of the old epoch are dropped
    assert again.result(timeout=300) == list(range(executor.world_size))
    assert_serves(executor, 1)


def test_a_death_during_a_recovery_is_another_epoch(executor_factory: ExecutorFactory) -> None:
    executor = started(executor_factory)
    last = executor_factory.last_rank
    executor.collective_rpc("on_join", (0, "die"))
    executor.collective_rpc("script", (last, 0, "die", "out of memory"))
    error = error_of(executor.execute_model(plan(0), non_block=True))
    if not executor.can_recover or last == 0:
        pytest.skip("needs a rank that survives the first fault")
    result = recovery.recover(executor, error)
    assert (result.epoch, result.replaced) == (2, (0, last))
    assert_serves(executor, 1)


def test_a_rank_that_cannot_join_is_replaced(executor_factory: ExecutorFactory) -> None:
    executor = started(executor_factory)
    executor.collective_rpc("on_join", (0, "fail"))
    executor.collective_rpc("script", (executor_factory.last_rank, 0, "raise", "bad luck"))
    error = error_of(executor.execute_model(plan(0), non_block=True))
    if not executor.can_recover:
        pytest.skip("an external launcher starts the ranks")
    result = recovery.recover(executor, error)
    assert (result.epoch, result.replaced) == (2, (0,))
    assert_serves(executor, 1)


@pytest.mark.parametrize("limits", [{"max_recoveries": 0}, {"enabled": False}])
def test_a_recovery_that_is_not_allowed_raises_the_cause(
    executor_factory: ExecutorFactory, limits: dict[str, Any]
) -> None:
    executor = executor_factory(fault_tolerance=FaultToleranceConfig(**limits))
    with pytest.raises(WorkerDiedError) as caught:
        executor.collective_rpc("die", (0, "out of memory"))
    with pytest.raises(WorkerDiedError) as again:
        recovery.recover(executor, caught.value)
    assert again.value is caught.value
