"""The step protocol over a transport that only records: what is sent, to whom and in which order."""

from __future__ import annotations

import threading
import time

import pytest

from inflight.executor.executor import Executor
from inflight.interface.messages import ExecuteModel, RpcCall, RpcReply, StepReply, WorkerCommand
from inflight.interface.start_up import EpochCommand
from inflight.interface.step import ModelRunnerOutput
from tests.conformance.configs import engine_config, kv_cache_config, plan

NUM_RANKS = 3


class RecordingExecutor(Executor):
    """Answers every command at once, from within `_send`."""

    def __init__(self) -> None:
        super().__init__(engine_config(tensor_parallel_size=NUM_RANKS))
        self.sent: list[list[WorkerCommand]] = [[] for _ in range(NUM_RANKS)]
        self.num_terminated = 0
        self._start()

    def _launch(self) -> None:
        pass

    def _send(self, rank: int, command: WorkerCommand | EpochCommand) -> None:
        time.sleep(0.0002)  # another thread gets its chance
        self.sent[rank].append(command)
        assert isinstance(command, ExecuteModel | RpcCall), command
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
    with pytest.raises(AssertionError, match="1 KV cache configs for 3 ranks"):
        executor.initialize_from_config([kv_cache_config(4)])
    executor.shutdown()
