"""What every executor promises: start-up, steps, calls, health and end. Faults are in test_executor_faults.py."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

import numpy as np
import pytest

from inflight.errors import (
    ConfigError,
    EngineClosedError,
    OutOfMemoryError,
    StepError,
    StepTimeoutError,
    WorkerDiedError,
)
from inflight.executor.executor import Executor
from inflight.interface.step import GrammarOutput
from tests.conformance.configs import engine_config, kv_cache_config, plan
from tests.conformance.conftest import ExecutorFactory
from tests.support.enough_time import with_enough_time


def test_get_class_finds_the_executor(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    assert Executor.get_class(executor.config) is type(executor)


def test_get_class_refuses_an_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="'carrier-pigeon' cannot be imported"):
        Executor.get_class(engine_config(backend="carrier-pigeon"))


# -- start-up --------------------------------------------------------------------------------------------------


def test_each_rank_takes_part_in_the_start(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    configs = [kv_cache_config(10 + rank) for rank in range(executor.world_size)]
    assert [list(specs) for specs in executor.get_kv_cache_specs()] == [
        [f"layers.{rank}"] for rank in range(executor.world_size)
    ]
    assert executor.determine_available_memory() == [1000 + rank for rank in range(executor.world_size)]
    executor.initialize_from_config(configs)
    for rank, calls in enumerate(executor.collective_rpc("calls")):
        assert calls == [
            "load_model",
            "get_kv_cache_specs",
            "determine_available_memory",
            f"initialize_from_config({10 + rank})",  # each rank got its own
        ]


def test_memory_that_cannot_be_had_is_raised_as_it_is(executor_factory: ExecutorFactory) -> None:
    rank = executor_factory.last_rank
    executor = executor_factory(name=f"{rank}:memory")
    configs = [kv_cache_config(10)] * executor.world_size
    with pytest.raises(OutOfMemoryError) as caught:
        executor.initialize_from_config(configs)
    assert str(caught.value) == f"rank {rank}: the KV cache cannot be allocated"
    (note,) = caught.value.__notes__
    assert "in initialize_from_config" in note
    assert executor.execute_model(plan(0)).step_id == 0, "the ranks go on"


def test_a_config_error_at_start_up_is_raised_as_it_is(executor_factory: ExecutorFactory) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        executor_factory(name=f"{executor_factory.last_rank}:config")


@pytest.mark.parametrize(
    ("fault", "text"), [("bug", "KeyError: 'a bug in load_model'"), ("exit", "left while loading")]
)
def test_another_error_at_start_up_is_wrapped(executor_factory: ExecutorFactory, fault: str, text: str) -> None:
    rank = executor_factory.last_rank
    with pytest.raises(WorkerDiedError, match=f"rank {rank} could not start") as caught:
        executor_factory(name=f"{rank}:{fault}")
    assert caught.value.rank == rank
    assert text in str(caught.value)
    assert "in load_model" in caught.value.worker_traceback


# -- steps -----------------------------------------------------------------------------------------------------


def test_tokens_come_from_the_output_rank(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    assert executor.output_rank == executor.world_size - executor_factory.tensor_parallel_size
    output = executor.execute_model(plan(3))
    assert output.step_id == 3
    assert output.sampled_token_ids.tolist() == [3000 + executor.output_rank]
    assert output.sampled_token_ids.dtype == np.int32


def test_non_block_returns_while_the_step_runs(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    executor = executor_factory()
    release = tmp_path / "release"
    executor.collective_rpc("script", (None, 0, "hold", str(release)))
    future = executor.execute_model(plan(0), non_block=True)
    assert not future.done()
    release.touch()
    assert future.result(timeout=300).step_id == 0


def test_futures_may_be_waited_for_in_any_order(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    futures = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(6)]
    for step_id in (4, 0, 5, 2, 1, 3):
        assert futures[step_id].result(timeout=300).sampled_token_ids.tolist() == [
            1000 * step_id + executor.output_rank
        ]


def test_a_step_waits_for_its_slowest_rank(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    for slow_rank in range(executor_factory.world_size):
        executor = executor_factory()
        release = tmp_path / f"release-{slow_rank}"
        executor.collective_rpc("script", (slow_rank, 0, "hold", str(release)))
        future = executor.execute_model(plan(0), non_block=True)
        assert not wait_for([future], timeout=0.02).done
        release.touch()
        assert future.result(timeout=300).step_id == 0


def test_steps_reach_every_rank_in_order(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    for step_id in (0, 1, 5):
        executor.execute_model(plan(step_id))
    for calls in executor.collective_rpc("calls"):
        assert calls == ["load_model", "execute_model(0)", "execute_model(1)", "execute_model(5)"]


def test_a_future_cannot_be_cancelled(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    executor.collective_rpc("script", (None, 0, "sleep", 0.01))
    future = executor.execute_model(plan(0), non_block=True)
    assert not future.cancel()
    assert future.result(timeout=300).step_id == 0


def test_a_dummy_batch_reaches_all_ranks(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    executor.collective_rpc("execute_dummy_batch")
    assert executor.collective_rpc("calls") == [["load_model", "execute_dummy_batch"]] * executor.world_size


# -- calls -----------------------------------------------------------------------------------------------------


def test_a_call_returns_one_value_per_rank(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    values = executor.collective_rpc("echo", (1, "two"), {"three": 3})
    assert [tuple(value) for value in values] == [
        (rank, (1, "two"), {"three": 3}) for rank in range(executor.world_size)
    ]


def test_a_call_may_want_one_rank_only(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    executor = executor_factory()
    last = executor.world_size - 1
    assert executor.collective_rpc("echo", (1,), unique_reply_rank=last)[0] == last
    release = tmp_path / "release"
    for rank in range(last):  # the last rank does not wait for the others
        value = executor.collective_rpc("hold", (rank, str(release)), unique_reply_rank=last, timeout=60)
        assert value == last
    release.touch()
    for rank in range(last):  # and is not harmed by what fails on them
        assert executor.collective_rpc("fail", (rank, "not me"), unique_reply_rank=last) == last
    with pytest.raises(StepError, match="it is me"):
        executor.collective_rpc("fail", (last, "it is me"), unique_reply_rank=last)
    assert len(executor.collective_rpc("calls")) == executor.world_size


def test_a_call_may_return_a_future(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    executor = executor_factory()
    release = tmp_path / "release"
    future = executor.collective_rpc("hold", (None, str(release)), non_block=True)
    unique = executor.collective_rpc("echo", non_block=True, unique_reply_rank=0)
    assert isinstance(future, Future)
    assert not future.done()
    assert not unique.done()
    release.touch()
    assert future.result(timeout=300) == list(range(executor.world_size))
    assert unique.result(timeout=300)[0] == 0


def test_a_call_runs_after_the_steps_in_flight(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    executor.collective_rpc("script", (None, 0, "sleep", 0.02))
    futures = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(3)]
    calls = executor.collective_rpc("calls")
    assert all(future.done() for future in futures)
    assert calls == [["load_model", *(f"execute_model({step_id})" for step_id in range(3))]] * executor.world_size


def test_a_call_beside_the_steps_waits_for_none_and_none_waits_for_it(
    executor_factory: ExecutorFactory, tmp_path: Path
) -> None:
    if executor_factory.backend == "external_launcher":
        pytest.skip("its engines publish their replies in the order of the commands")
    executor = executor_factory()
    last_stage, ranks = range(executor.output_rank, executor.world_size), list(range(executor.world_size))
    for rank in last_stage:
        executor.collective_rpc("script", (rank, 0, "masks", None))
    step = executor.execute_model(plan(0), non_block=True)
    assert len(executor.collective_rpc("echo", beside=True)) == executor.world_size
    assert not step.done()  # it waits for its masks
    nothing = np.ones((1, 1), dtype=np.int32)
    one = np.zeros(1, dtype=np.int32)
    executor.provide_grammar_output(0, GrammarOutput(rows=one, num_masks=one + 1, masks=nothing))
    assert step.result(timeout=300).step_id == 0
    release = tmp_path / "release"
    begun = executor.collective_rpc("begin", (None, str(release)), non_block=True, beside=True)
    assert executor.collective_rpc("hold", (-1, str(release))) == ranks
    assert not begun.done()
    release.touch()
    assert begun.result(timeout=300) == ranks
    executor.collective_rpc("begin", (0, str(release)), beside=True, unique_reply_rank=0)
    with pytest.raises(StepError, match="failed later") as failed:
        executor.collective_rpc("begin_to_fail", (ranks[-1],), beside=True)
    assert failed.value.rank == ranks[-1]
    with pytest.raises(StepError, match="no public method 'missing'"):
        executor.collective_rpc("missing", beside=True)


def test_masks_go_to_the_rank_that_draws_and_past_a_call_that_waits_for_their_step(
    executor_factory: ExecutorFactory,
) -> None:
    executor = executor_factory()
    last_stage = range(executor.output_rank, executor.world_size)
    for rank in last_stage:
        for step_id in range(2):
            executor.collective_rpc("script", (rank, step_id, "masks", None))
    futures = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(2)]
    call = executor.collective_rpc("calls", non_block=True)
    for step_id in (1, 0):  # in any order, and larger than a socket's buffer
        masks = np.full((3, 100_000), step_id + 1, dtype=np.int32)
        output = GrammarOutput(
            rows=np.array([0, 1], dtype=np.int32), num_masks=np.array([1, 2], dtype=np.int32), masks=masks
        )
        executor.provide_grammar_output(step_id, output)
    assert [future.result(timeout=300).step_id for future in futures] == [0, 1]
    for rank, calls in enumerate(call.result(timeout=300)):
        shape = (3, 100_000) if rank == executor.output_rank else (0, 100_000)
        told = [f"masks({step_id}, [1, 2], {shape})" for step_id in (1, 0)] if rank in last_stage else []
        assert [line for line in calls if line.startswith("masks")] == told
    executor.shutdown()
    executor.provide_grammar_output(0, output)  # nobody is there


def test_calls_of_many_threads_reach_the_ranks_in_one_order(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()

    def call(thread: int) -> None:
        for i in range(20):
            executor.collective_rpc("note", (None, f"{thread}.{i}"))

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = executor.collective_rpc("calls")
    assert len(calls[0]) == 1 + 80
    assert calls == [calls[0]] * executor.world_size


def test_a_call_that_fails_names_method_and_rank(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    rank = executor_factory.last_rank
    with pytest.raises(StepError, match=rf"'fail'\) failed on rank {rank}: RuntimeError: bad luck") as caught:
        executor.collective_rpc("fail", (rank, "bad luck"))
    assert caught.value.rank == rank
    assert caught.value.step_id is None
    assert "in fail" in caught.value.worker_traceback
    assert "in fail" in str(caught.value)


@pytest.mark.parametrize("method", ["fly", "_rank", "__init__"])
def test_an_unknown_method_is_named(executor_factory: ExecutorFactory, method: str) -> None:
    executor = executor_factory()
    with pytest.raises(StepError, match=f"'{method}'; .*check_health"):
        executor.collective_rpc(method)
    executor.check_health()


def test_a_call_times_out(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    rank = executor_factory.last_rank

    def check(seconds: float) -> None:
        executor, release = executor_factory(), tmp_path / f"release-{seconds}"
        try:
            with pytest.raises(
                StepTimeoutError, match=rf"'hold'\) .* within {seconds:g} s from rank {rank}\b"
            ) as caught:
                executor.collective_rpc("hold", (rank, str(release)), timeout=seconds)
        finally:
            release.touch()
        assert caught.value.rank == rank
        assert caught.value.step_id is None
        assert len(executor.collective_rpc("calls")) == executor.world_size  # the late reply answers nothing else

    with_enough_time(check)


# -- health and end --------------------------------------------------------------------------------------------


def test_check_health_asks_every_rank(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    executor.check_health()
    assert executor.collective_rpc("calls") == [["load_model", "check_health"]] * executor.world_size
    executor.collective_rpc("note", (executor_factory.last_rank, "sick"))
    with pytest.raises(StepError, match="this rank is sick"):
        executor.check_health()


def test_after_shutdown_everything_is_refused(executor_factory: ExecutorFactory) -> None:
    executor = executor_factory()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineClosedError):
        executor.execute_model(plan(0))
    with pytest.raises(EngineClosedError):
        executor.execute_model(plan(0), non_block=True).result(timeout=300)  # the error is in the future
    with pytest.raises(EngineClosedError, match="'echo'"):
        executor.collective_rpc("echo")
    with pytest.raises(EngineClosedError):
        executor.check_health()
    with pytest.raises(EngineClosedError):
        executor.collective_rpc("execute_dummy_batch")
    with pytest.raises(EngineClosedError):
        executor.get_kv_cache_specs()


def test_shutdown_fails_what_is_pending(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    """Ranks that hang do not hang the shutdown: it takes about the budget of a step."""

    def check(budget: float) -> None:
        executor, release = executor_factory(budget=budget), tmp_path / f"release-{budget}"
        executor.collective_rpc("script", (None, 0, "hold", str(release)))
        steps = [executor.execute_model(plan(step_id), non_block=True) for step_id in range(3)]
        call = executor.collective_rpc("echo", non_block=True)
        start = time.monotonic()
        executor.shutdown()
        taken = time.monotonic() - start
        release.touch()
        assert taken < 60 + budget
        for future in (*steps, call):
            error = future.exception(timeout=0)
            assert isinstance(error, EngineClosedError) and "shut down before" in str(error)

    with_enough_time(check)  # if the budget is over before the shutdown begins, the steps have timed out


def test_shutdown_wakes_a_caller_that_waits(executor_factory: ExecutorFactory, tmp_path: Path) -> None:
    executor = executor_factory(budget=0.2)
    release = tmp_path / "release"
    caught: list[Exception] = []

    def call() -> None:
        try:
            executor.collective_rpc("hold", (None, str(release)))
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.02)
    executor.shutdown()
    thread.join(300)
    release.touch()
    assert len(caught) == 1
    assert isinstance(caught[0], EngineClosedError)
