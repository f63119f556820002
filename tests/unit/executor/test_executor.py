"""The step protocol over a transport that only records: what is sent, to whom and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.errors import ConfigError, EngineClosedError, StepError, StepTimeoutError, WorkerDiedError
from inflight.executor import executor as executor_module
from inflight.executor.executor import Executor
from inflight.executor.recovery import recover
from inflight.interface.messages import ExecuteModel, ProvideGrammarOutput, RpcCall, RpcReply, StepReply, WorkerCommand
from inflight.interface.start_up import EpochCommand, Listening, Ready
from inflight.interface.step import GrammarOutput, ModelRunnerOutput
from tests.conformance.configs import engine_config, kv_cache_config, plan

NUM_RANKS = 3


class RecordingExecutor(Executor):
    """Answers every command at once, from within `_send`."""

    def __init__(self) -> None:
        super().__init__(engine_config(tensor_parallel_size=NUM_RANKS))
        self.sent: list[list[ExecuteModel | RpcCall]] = [[] for _ in range(NUM_RANKS)]
        self.num_terminated = 0
        self._start()

    def _launch(self) -> None:
        pass

    def _send(self, rank: int, command: WorkerCommand | EpochCommand) -> None:
        time.sleep(0.0002)  # another thread gets its chance
        assert isinstance(command, ExecuteModel | RpcCall), command
        self.sent[rank].append(command)
        if isinstance(command, RpcCall):
            self._deliver(RpcReply(epoch=command.epoch, call_id=command.call_id, rank=rank))
        else:
            step_id = command.scheduler_output.step_id
            output = ModelRunnerOutput(step_id=step_id)
            self._deliver(StepReply(epoch=command.epoch, step_id=step_id, rank=rank, output=output))

    def _ask(self, rank: int) -> None:
        raise AssertionError("every rank has answered")

    def _terminate(self) -> None:
        self.num_terminated += 1


def test_a_reply_may_come_before_send_returns() -> None:
    executor = RecordingExecutor()
    assert executor.execute_model(plan(0)).step_id == 0
    assert executor.collective_rpc("f") == [None] * NUM_RANKS
    executor.shutdown()


def test_all_ranks_see_one_order_whichever_threads_call() -> None:
    executor = RecordingExecutor()
    steps_and_calls = [
        threading.Thread(target=lambda: [executor.execute_model(plan(step_id)) for step_id in range(10)]),
        *(threading.Thread(target=lambda: [executor.collective_rpc("f") for _ in range(10)]) for _ in range(2)),
    ]
    for thread in steps_and_calls:
        thread.start()
    for thread in steps_and_calls:
        thread.join()
    executor.shutdown()
    orders = [
        [
            command.scheduler_output.step_id if isinstance(command, ExecuteModel) else f"call {command.call_id}"
            for command in sent
        ]
        for sent in executor.sent
    ]
    assert len(orders[0]) == 30
    assert orders == [orders[0]] * NUM_RANKS


def test_nothing_is_sent_after_the_end() -> None:
    executor = RecordingExecutor()
    executor.shutdown()
    executor.shutdown()
    executor.execute_model(plan(0), non_block=True)
    executor.collective_rpc("f", non_block=True)
    assert executor.sent == [[], [], []]
    assert executor.num_terminated == 1


def test_equal_cache_configs_are_sent_once() -> None:
    executor = RecordingExecutor()
    for num_blocks in (4, 4, 5):
        executor.initialize_from_config([kv_cache_config(num_blocks + rank) for rank in range(NUM_RANKS)])
    sent = [[command.args[0].num_blocks for command in sent if isinstance(command, RpcCall)] for sent in executor.sent]
    assert sent == [[4, 5], [5, 6], [6, 7]]
    assert not any(command.beside for command in executor.sent[0] if isinstance(command, RpcCall))
    with pytest.raises(AssertionError, match="1 KV cache configs for 3 ranks"):
        executor.initialize_from_config([kv_cache_config(4)])
    executor.shutdown()


class SilentExecutor(Executor):
    """Two stages of two ranks, which never answer. Remembers what is done in which order."""

    def __init__(self, config: Any = None) -> None:
        parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
        super().__init__(config or engine_config(budget=0.05, **parallel))  # type: ignore[arg-type]
        self.log: list[Any] = []
        self._start()

    def _prepare(self) -> None:
        self.log.append("prepare")

    def _launch(self) -> None:
        self.log.append("launch")

    def _send(self, rank: int, command: WorkerCommand | EpochCommand) -> None:
        self.log.append((rank, command))

    def _ask(self, rank: int) -> None:
        pass

    def _terminate(self) -> None:
        self.log.append("terminate")


def test_masks_go_to_the_rank_that_draws_and_a_notice_to_its_stage() -> None:
    executor = SilentExecutor()
    future = executor.execute_model(plan(3), non_block=True, budget=100.0)
    executor.log.clear()
    output = GrammarOutput(
        rows=np.array([1], np.int32), num_masks=np.array([2], np.int32), masks=np.full((2, 1), 7, np.int32)
    )
    executor.provide_grammar_output(3, output)
    assert [rank for rank, _ in executor.log] == [2, 3]
    commands = [command for _, command in executor.log]
    assert all(isinstance(command, ProvideGrammarOutput) for command in commands)
    assert [(command.epoch, command.step_id) for command in commands] == [(0, 3)] * 2
    assert [command.grammar_output.masks.shape for command in commands] == [(2, 1), (0, 1)]
    assert [command.grammar_output.num_masks.tolist() for command in commands] == [[2], [2]]
    executor.shutdown()
    executor.log.clear()
    executor.provide_grammar_output(3, output)
    assert executor.log == []
    assert isinstance(future.exception(timeout=300), EngineClosedError)


def test_what_a_call_sends() -> None:
    executor = RecordingExecutor()
    assert executor.collective_rpc("f", (1,), {"a": 2}) == [None] * NUM_RANKS
    assert executor.collective_rpc("g", [3], unique_reply_rank=1, beside=True) is None
    future = executor.collective_rpc("h", non_block=True)
    assert future.result(timeout=300) == [None] * NUM_RANKS
    executor.execute_dummy_batch()
    executor.check_health()
    sent = [
        (call.epoch, call.call_id, call.method, call.args, call.kwargs, call.beside)
        for call in executor.sent[0]
        if isinstance(call, RpcCall)
    ]
    first = sent[0][1]
    assert sent == [
        (0, first, "f", (1,), {"a": 2}, False),
        (0, first + 1, "g", (3,), {}, True),
        (0, first + 2, "h", (), {}, False),
        (0, first + 3, "execute_dummy_batch", (), {}, False),
        (0, first + 4, "check_health", (), {}, False),
    ]
    with pytest.raises(AssertionError):
        executor.collective_rpc("f", unique_reply_rank=NUM_RANKS)
    executor.shutdown()


@pytest.mark.parametrize("act", [Executor.execute_dummy_batch, Executor.check_health])
def test_ranks_that_do_not_answer_have_as_much_time_as_for_a_step(act: Callable[[Executor], None]) -> None:
    executor = SilentExecutor()
    with pytest.raises(StepTimeoutError):
        act(executor)
    executor.shutdown()


def test_a_lost_rank_is_told_at_once() -> None:
    executor = SilentExecutor()
    executor.raise_if_lost()
    woken = threading.Event()
    executor.set_death_callback(woken.set)
    executor._rank_died(1, "it was killed")
    assert woken.wait(300)
    executor.log.clear()
    for act in (executor.raise_if_lost, executor.check_health):
        with pytest.raises(WorkerDiedError, match="it was killed"):
            act()
    assert executor.log == [], "no rank was asked"
    executor.shutdown()
    with pytest.raises(EngineClosedError):
        executor.raise_if_lost()


def test_ranks_are_prepared_before_the_wait_and_load_after_it() -> None:
    order: list[str] = []

    class Ordered(SilentExecutor):
        def _prepare(self) -> None:
            order.append("prepare")

        def _launch(self) -> None:
            order.append("launch")

    executor = Ordered.after_waiting(engine_config(tensor_parallel_size=3), lambda: order.append("wait"))
    assert (executor.world_size, order) == (3, ["prepare", "wait", "launch"])
    executor.shutdown()
    Ordered().shutdown()  # it does not wait, so it need not prepare
    assert order == ["prepare", "wait", "launch", "launch"]


def test_a_failed_wait_stops_the_ranks() -> None:
    logs: list[list[Any]] = []

    class Watched(SilentExecutor):
        def _terminate(self) -> None:
            super()._terminate()
            logs.append(self.log)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Watched.after_waiting(engine_config(), fail)
    assert logs == [["prepare", "terminate"]]


def test_a_new_epoch_drops_what_is_pending_and_forgets_who_was_lost() -> None:
    executor = SilentExecutor(engine_config(tensor_parallel_size=2, budget=100.0))
    step = executor.execute_model(plan(0), non_block=True)
    call = executor.collective_rpc("f", non_block=True)
    executor._rank_died(1, "it was killed")
    cause = step.exception(timeout=300)
    assert isinstance(cause, WorkerDiedError) and isinstance(call.exception(timeout=300), WorkerDiedError)
    assert executor.begin_epoch(cause) == {1}
    assert (executor.meeting.epoch, executor.begin_epoch(cause)) == (1, set())
    assert executor.meeting.epoch == 2
    executor.raise_if_lost()
    executor.log.clear()
    step = executor.execute_model(plan(1), non_block=True, budget=7.0)
    assert [(rank, command.epoch) for rank, command in executor.log] == [(0, 2), (1, 2)]
    assert executor.longest_budget == 7.0
    executor.begin_epoch(cause)
    dropped = step.exception(timeout=300)
    assert isinstance(dropped, WorkerDiedError) and dropped.rank == cause.rank == 1
    assert "step 1" in str(dropped) and "it was killed" in str(dropped)
    assert executor.longest_budget == 0.0
    executor._deliver(StepReply(epoch=2, step_id=1, rank=0, output=ModelRunnerOutput(step_id=1)))
    assert executor.num_stale_frames == 1
    executor.shutdown()
    with pytest.raises(EngineClosedError):
        executor.begin_epoch(cause)


class ReplacingExecutor(SilentExecutor):
    """Its lost ranks can be replaced. `seen`: what is known of a rank when its new process is started."""

    seen: tuple[bool, bool, bool]

    def _discard(self, rank: int) -> None:
        self.log.append(f"discard {rank}")

    def _start_again(self, rank: int) -> None:
        self.log.append(f"start {rank}")
        self.raise_if_lost()
        self.seen = rank in self.meeting.failed, rank in self.starting, rank in self._table._dead_ranks


def test_nothing_of_a_replaced_rank_counts_any_more() -> None:
    executor = ReplacingExecutor()
    executor.begin_epoch(WorkerDiedError("lost", rank=1))
    executor.meeting.fail(1, WorkerDiedError("lost", rank=1))
    executor._rank_died(1, "it was killed")
    executor.replace_rank(1)
    assert executor.log[-2:] == ["discard 1", "start 1"]
    assert executor.seen == (False, True, False)
    executor.shutdown()
    executor.log.clear()
    with pytest.raises(EngineClosedError):
        executor.replace_rank(1)
    assert executor.log == []


def test_ranks_that_could_not_join_an_epoch_are_lost_to_the_next_one() -> None:
    """But not those that failed only because others did."""
    executor = ReplacingExecutor()
    cause = WorkerDiedError("lost", rank=1)
    executor.meeting.fail(0, StepError("an echo", rank=0, is_echo=True))
    executor.meeting.fail(1, StepError("a cause", rank=1))
    executor.meeting.fail(2, ConfigError("no such file"))
    assert executor.begin_epoch(cause) == {1, 2}
    assert executor.begin_epoch(cause) == set()
    executor.shutdown()


@pytest.mark.parametrize("in_recovery", [False, True])
def test_a_shutdown_ends_all_waits_for_ranks(in_recovery: bool) -> None:
    executor = ReplacingExecutor()
    if in_recovery:
        executor.shutdown()
        with pytest.raises(EngineClosedError):
            executor.begin_epoch(WorkerDiedError("lost", rank=1))
    else:
        executor.shutdown()
    for wait in (executor.meeting.wait_until_all_listen, executor.meeting.wait_until_all_are_ready):
        with pytest.raises(EngineClosedError):
            wait(time.monotonic() + 300)


@pytest.mark.parametrize(("can_recover", "enabled"), [(False, True), (True, False)])
def test_an_executor_that_may_not_recover_raises_the_cause(can_recover: bool, enabled: bool) -> None:
    config = replace(engine_config(), fault_tolerance=FaultToleranceConfig(enabled=enabled))
    executor = ReplacingExecutor(config)
    executor.can_recover = can_recover
    cause = WorkerDiedError("lost", rank=0)
    with pytest.raises(WorkerDiedError) as raised:
        recover(executor, cause)
    assert raised.value is cause and executor.meeting.epoch == 0
    executor.shutdown()


def test_stale_messages_of_ranks_and_executor_are_counted_together() -> None:
    executor = ReplacingExecutor(engine_config())
    executor.begin_epoch(WorkerDiedError("lost", rank=0))
    executor._deliver(StepReply(epoch=0, step_id=1, rank=0, output=ModelRunnerOutput(step_id=1)))
    executor._deliver(Listening(rank=0, epoch=1, address=("h", 1), num_dropped=3))
    assert executor.num_stale_frames == 4
    executor._deliver(Ready(rank=0, epoch=0))  # of the epoch before
    assert executor.num_stale_frames == 5
    executor.shutdown()


def test_ranks_have_less_time_to_end_if_one_is_lost_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ReplacingExecutor(engine_config(budget=100.0))
    brief = ReplacingExecutor(engine_config(budget=0.2))
    monkeypatch.setattr(executor_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    ends = [executor._shutdown_deadline(), executor._shutdown_deadline(is_broken=True), brief._shutdown_deadline()]
    assert ends == [1005.0, 1000.5, 1000.2]
    silent = StepTimeoutError("silent", rank=0)
    assert executor.root_cause(silent) is silent
    assert executor._shutdown_deadline() == 1000.5
    executor.begin_epoch(silent)
    assert executor._shutdown_deadline() == 1005.0
    monkeypatch.undo()
    executor.shutdown()
    brief.shutdown()
