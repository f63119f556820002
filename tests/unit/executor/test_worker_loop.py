"""One rank's loop, without a thread and without an executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inflight.executor.worker_loop import WorkerLoop
from inflight.interface.messages import (
    ExecuteModel,
    RpcCall,
    RpcReply,
    StepReply,
    WorkerCommand,
    WorkerFailure,
    WorkerReply,
)
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from tests.conformance.configs import engine_config, plan
from tests.conformance.scripted_worker import ScriptedWorker


def call(call_id: int, method: str, *args: Any) -> RpcCall:
    return RpcCall(epoch=5, call_id=call_id, method=method, args=args, kwargs={})


def run(worker: ScriptedWorker, *commands: WorkerCommand) -> list[WorkerReply]:
    replies: list[WorkerReply] = []
    inbox = iter((*commands, None))
    WorkerLoop(worker, 3, lambda: next(inbox), replies.append).run()
    return replies


def worker() -> ScriptedWorker:
    return ScriptedWorker(engine_config(), 3, None)


def test_commands_are_answered_in_order_with_epoch_id_and_rank() -> None:
    step = ExecuteModel(epoch=5, scheduler_output=plan(7))
    first, second = run(worker(), step, call(9, "echo", 1))
    assert isinstance(first, StepReply)
    assert isinstance(first.result, ModelRunnerOutput)
    assert (first.epoch, first.step_id, first.rank) == (5, 7, 3)
    assert second == RpcReply(epoch=5, call_id=9, rank=3, value=(3, (1,), {}))


def test_an_exception_becomes_the_reply_and_the_loop_goes_on() -> None:
    step = ExecuteModel(epoch=5, scheduler_output=plan(7))
    replies = run(worker(), call(0, "script", 3, 7, "raise", "bad luck"), step, call(1, "fail", 3, "again"))
    assert isinstance(replies[1], StepReply)
    assert isinstance(replies[2], RpcReply)
    for failure, text in ((replies[1].result, "bad luck"), (replies[2].failure, "again")):
        assert isinstance(failure, WorkerFailure)
        assert (failure.type_name, failure.message) == ("RuntimeError", text)
        assert "in fail" in failure.traceback


def test_wrong_arguments_are_a_failure_of_the_call() -> None:
    (reply,) = run(worker(), call(0, "sleep", 1, 2, 3, 4))
    assert isinstance(reply, RpcReply)
    assert reply.failure is not None
    assert reply.failure.type_name == "TypeError"


def test_an_answer_to_another_step_is_a_failure() -> None:
    class Confused(ScriptedWorker):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            return replace(super().execute_model(scheduler_output), step_id=0)

    (reply,) = run(Confused(engine_config(), 3, None), ExecuteModel(epoch=5, scheduler_output=plan(7)))
    assert isinstance(reply, StepReply)
    assert isinstance(reply.result, WorkerFailure)
    assert "answered step 7 with step 0" in reply.result.message


@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt])
def test_what_is_no_exception_leaves_the_loop(death: type[BaseException]) -> None:
    class Mortal(ScriptedWorker):
        def check_health(self) -> None:
            raise death("the end")

    with pytest.raises(death, match="the end"):
        run(Mortal(engine_config(), 3, None), call(0, "check_health"))


def test_activity_says_what_runs() -> None:
    seen: list[str] = []

    class Watched(ScriptedWorker):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            seen.append(loop.activity)
            return super().execute_model(scheduler_output)

        def check_health(self) -> None:
            seen.append(loop.activity)

    inbox = iter((ExecuteModel(epoch=5, scheduler_output=plan(7)), call(0, "check_health"), None))
    loop = WorkerLoop(Watched(engine_config(), 3, None), 3, lambda: next(inbox), lambda _: seen.append(loop.activity))
    loop.run()
    assert seen == ["running step 7", "idle", "running check_health()", "idle"]
