"""What only the executor in one process has: threads, and messages by reference."""

from __future__ import annotations

import threading
import time

import pytest

from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.errors import ConfigError, RankError, StepTimeoutError, WorkerDiedError
from inflight.executor import recovery
from inflight.executor.recovery import recover
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from tests.conformance.configs import engine_config, kv_cache_config, plan
from tests.conformance.scripted_worker import ScriptedWorker
from tests.support.enough_time import with_enough_time


def rank_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("inflight-")]


def test_a_rank_is_one_thread_from_start_to_end() -> None:
    seen: list[tuple[str, int]] = []

    class Witness(ScriptedWorker):
        def __init__(self, config: EngineConfig, place: Place, rendezvous: Rendezvous | None) -> None:
            seen.append(("__init__", threading.get_ident()))
            super().__init__(config, place, rendezvous)

        def load_model(self) -> None:
            seen.append(("load_model", threading.get_ident()))

        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            seen.append(("execute_model", threading.get_ident()))
            assert scheduler_output is the_plan  # by reference
            return super().execute_model(scheduler_output)

        def shutdown(self) -> None:
            seen.append(("shutdown", threading.get_ident()))

    the_plan = plan(0)
    executor = UniProcExecutor(engine_config(), Witness)
    executor.execute_model(the_plan)
    executor.shutdown()
    assert [name for name, _ in seen] == ["__init__", "load_model", "execute_model", "shutdown"]
    assert {ident for _, ident in seen} != {threading.get_ident()}
    assert len({ident for _, ident in seen}) == 1


def test_no_thread_is_left_after_shutdown_nor_after_a_failed_start() -> None:
    executor = UniProcExecutor(engine_config(tensor_parallel_size=3), ScriptedWorker)
    assert len(rank_threads()) == 4  # three ranks and the watcher
    executor.shutdown()
    assert rank_threads() == []
    with pytest.raises(ConfigError):
        UniProcExecutor(engine_config(tensor_parallel_size=3, name="1:config"), ScriptedWorker)
    assert rank_threads() == []


def test_a_failing_constructor_is_raised_by_the_executor() -> None:
    def make(config: EngineConfig, place: Place, rendezvous: Rendezvous | None) -> WorkerBase:
        raise ConfigError("no such device")

    with pytest.raises(ConfigError, match="no such device"):
        UniProcExecutor(engine_config(), make)


def test_a_failing_shutdown_of_a_worker_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(ScriptedWorker):
        def shutdown(self) -> None:
            raise RuntimeError("I stay")

    UniProcExecutor(engine_config(), Stubborn).shutdown()
    assert "rank 0: shutdown of its worker failed" in caplog.text
    assert "I stay" in caplog.text


def test_a_rank_that_hangs_is_left_behind_and_named(caplog: pytest.LogCaptureFixture) -> None:

    def check(budget: float) -> None:
        go_on = threading.Event()

        class Hanging(ScriptedWorker):
            def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
                go_on.wait(300)
                return super().execute_model(scheduler_output)

        executor = UniProcExecutor(engine_config(budget=budget), Hanging)
        try:
            with pytest.raises(StepTimeoutError, match=r"rank 0 \(running step 8\)"):
                executor.execute_model(plan(8))
            start = time.monotonic()
            executor.shutdown()
            assert time.monotonic() - start < 60 + budget
        finally:
            go_on.set()
            executor.shutdown()
            for thread in rank_threads():
                thread.join(300)
        assert "rank 0 did not end in time; its thread is left running: running step 8" in caplog.text

    with_enough_time(check)  # the thread of the rank may get no core before the step has timed out


def test_steps_that_wait_in_the_inbox_are_not_run_at_shutdown() -> None:
    entered, go_on = threading.Event(), threading.Event()
    steps: list[int] = []

    class Slow(ScriptedWorker):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            steps.append(scheduler_output.step_id)
            entered.set()
            go_on.wait(100)
            return super().execute_model(scheduler_output)

    executor = UniProcExecutor(engine_config(budget=0.05), Slow)
    for step_id in range(3):
        executor.execute_model(plan(step_id), non_block=True)
    assert entered.wait(300)
    executor.shutdown()
    go_on.set()
    for thread in rank_threads():
        thread.join(300)
    assert steps == [0]


def test_shutdown_from_a_callback() -> None:
    """It runs in the rank's own thread, which cannot join itself."""
    executor = UniProcExecutor(engine_config(), ScriptedWorker)
    executor.collective_rpc("script", (0, 0, "sleep", 0.02))
    done = threading.Event()

    def shut_down(_: object) -> None:
        executor.shutdown()
        done.set()

    executor.execute_model(plan(0), non_block=True).add_done_callback(shut_down)
    assert done.wait(300)
    for thread in rank_threads():
        thread.join(300)
    assert rank_threads() == []


def test_a_dead_rank_is_replaced_by_a_new_thread() -> None:
    executor = UniProcExecutor(engine_config(tensor_parallel_size=2), ScriptedWorker)
    executor.initialize_from_config([kv_cache_config(4 + rank) for rank in range(2)])
    executor.collective_rpc("note", (None, "survived"))
    executor.collective_rpc("script", (1, 0, "die", "out of memory"))
    with pytest.raises(WorkerDiedError, match="out of memory") as died:
        executor.execute_model(plan(0))
    result = recover(executor, died.value)
    assert (result.epoch, result.replaced, result.kept_arenas) == (1, (1,), False)
    assert executor.execute_model(plan(1)).sampled_token_ids.tolist() == [1000]
    first, second = executor.collective_rpc("calls")
    assert "survived" in first and first.count("load_model") == 1
    assert second == ["load_model", "initialize_from_config(5)", "execute_model(1)"]
    assert first.count("initialize_from_config(4)") == 2, "a survivor warms up again"
    assert executor.num_spares == 0
    executor.shutdown()
    assert rank_threads() == []


def test_what_a_discarded_rank_reports_later_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot be killed: it may end long after another one has replaced it."""
    go_on = threading.Event()
    left: list[threading.Thread] = []

    class Hanging(ScriptedWorker):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            if self._rank == 1 and not left:
                left.append(threading.current_thread())
                go_on.wait(300)
                raise SystemExit("ended at last")
            output = super().execute_model(scheduler_output)
            assert isinstance(output, ModelRunnerOutput)
            return output

    def check(budget: float) -> None:
        left.clear()
        go_on.clear()
        monkeypatch.setattr(recovery, "REPORT_SECONDS", budget)
        executor = UniProcExecutor(engine_config(tensor_parallel_size=2, budget=budget), Hanging)
        try:
            with pytest.raises(StepTimeoutError) as late:
                executor.execute_model(plan(0))
            assert left, "the rank has begun its step"
            assert recover(executor, late.value).replaced == (1,)
            go_on.set()
            left[0].join(300)
            executor.raise_if_lost()
            assert executor.execute_model(plan(1)).sampled_token_ids.tolist() == [1000]
        finally:
            go_on.set()
            executor.shutdown()
            for thread in rank_threads():
                thread.join(300)

    with_enough_time(check)


def test_a_failed_step_begins_a_new_epoch_with_all_ranks() -> None:
    executor = UniProcExecutor(engine_config(tensor_parallel_size=2), ScriptedWorker)
    executor.initialize_from_config([kv_cache_config(4)] * 2)
    executor.collective_rpc("script", (0, 0, "raise", "bad luck"))
    with pytest.raises(RankError, match="bad luck") as failed:
        executor.execute_model(plan(0))
    result = recover(executor, failed.value)
    assert (result.epoch, result.replaced, result.kept_arenas) == (1, (), True)
    assert executor.execute_model(plan(1)).sampled_token_ids.tolist() == [1000]
    assert [calls.count("join_epoch") for calls in executor.collective_rpc("calls")] == [1, 1]
    executor.shutdown()
