"""Calls beside the steps, and commands that wait for steps, in the loop of one rank."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from inflight.config.ranks import places_on
from inflight.executor.worker_loop import WorkerLoop
from inflight.interface.messages import ExecuteModel, RpcCall, RpcReply, StepReply, WorkerReply
from inflight.interface.start_up import EpochReply
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from tests.conformance.configs import engine_config, plan
from tests.conformance.scripted_worker import ScriptedWorker
from tests.support.waits import wait_until


class Deferring(ScriptedWorker):
    """Answers steps and calls when the test says so."""

    def __init__(self) -> None:
        super().__init__(engine_config(), places_on([0] * 4)[3], None)
        self.steps: dict[int, Future[ModelRunnerOutput]] = {}
        self.begun: Future[Any] = Future()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self.steps.setdefault(scheduler_output.step_id, Future())

    def later(self) -> Future[Any]:
        return self.begun


class Rank:
    """A loop in a thread, and its replies."""

    def __init__(self) -> None:
        self.replies: list[WorkerReply | EpochReply] = []
        self.worker = Deferring()
        self.loop = WorkerLoop(3, self.replies.append, lambda rendezvous: self.worker)
        self.loop._worker = self.worker
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def call(self, call_id: int, method: str, *args: Any, beside: bool = False) -> None:
        self.loop.put(RpcCall(epoch=0, call_id=call_id, method=method, args=args, kwargs={}, beside=beside))

    def begin_step(self, step_id: int) -> None:
        self.loop.put(ExecuteModel(epoch=0, scheduler_output=plan(step_id)))
        wait_until(lambda: step_id in self.worker.steps)

    def end_step(self, step_id: int) -> None:
        self.worker.steps[step_id].set_result(ModelRunnerOutput(step_id=step_id))

    def answered(self, count: int) -> list[int]:
        """The ids of the steps and calls that have been answered, when there are so many."""
        wait_until(lambda: len(self.replies) >= count)
        return [
            reply.step_id if isinstance(reply, StepReply) else reply.call_id
            for reply in self.replies
            if isinstance(reply, StepReply | RpcReply)
        ]

    def end(self) -> None:
        self.loop.stop()
        self._thread.join(300)


@pytest.fixture
def rank() -> Any:
    rank = Rank()
    yield rank
    rank.end()


def test_a_call_waits_for_the_steps_before_it_and_one_beside_them_does_not(rank: Rank) -> None:
    rank.begin_step(0)
    rank.begin_step(1)
    rank.call(10, "echo", "after the steps")
    rank.call(11, "echo", "later", beside=True)
    rank.end_step(1)
    assert rank.answered(1) == [1], "step 0 runs, so nothing behind the call has begun"
    rank.end_step(0)
    assert rank.answered(4) == [1, 0, 10, 11]


def test_a_call_beside_a_step_is_answered_while_the_step_runs(rank: Rank) -> None:
    rank.begin_step(0)
    rank.call(11, "echo", 5, beside=True)
    assert rank.answered(1) == [11]
    assert rank.replies == [RpcReply(epoch=0, call_id=11, rank=3, value=(3, (5,), {}))]
    rank.end_step(0)
    assert rank.answered(2) == [11, 0]


def test_a_future_of_a_call_beside_steps_is_answered_when_it_is_done(rank: Rank) -> None:
    """No command waits for it."""
    rank.call(11, "later", beside=True)
    rank.call(12, "echo", 1)
    assert rank.answered(1) == [12]
    rank.worker.begun.set_result("done")
    assert rank.answered(2) == [12, 11]
    assert rank.replies[1] == RpcReply(epoch=0, call_id=11, rank=3, value="done")


def test_a_call_beside_steps_may_fail_at_once_or_later(rank: Rank) -> None:
    rank.call(11, "fail", 3, "at once", beside=True)
    rank.call(12, "begin_to_fail", 3, beside=True)
    assert rank.answered(2) == [11, 12]
    failures = [reply.failure for reply in rank.replies if isinstance(reply, RpcReply)]
    assert [failure and failure.message for failure in failures] == ["at once", "failed later"]


@pytest.mark.parametrize(("method", "is_known"), [("echo", True), ("_calls", False), ("nothing", False)])
def test_only_public_methods_can_be_called(rank: Rank, method: str, is_known: bool) -> None:
    rank.call(11, method)
    rank.answered(1)
    (reply,) = rank.replies
    assert isinstance(reply, RpcReply)
    assert (reply.failure is None) is is_known
    if reply.failure is not None:
        assert reply.failure.type_name == "AttributeError"
        assert f"Deferring has no public method {method!r}" in reply.failure.message
        assert "echo" in reply.failure.message and "_answer" not in reply.failure.message
