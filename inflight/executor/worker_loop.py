"""What runs on a rank: take a command, run it on the worker, reply; until there is no command any more."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from inflight.interface.messages import (
    ExecuteModel,
    RpcCall,
    RpcReply,
    StepReply,
    WorkerCommand,
    WorkerEvent,
    WorkerFailure,
    WorkerReply,
)
from inflight.interface.step import KVConnectorOutput, ModelRunnerOutput
from inflight.interface.worker import WorkerBase


class WorkerLoop:
    """One rank's loop, in the one thread that touches the worker.

    An exception of a command becomes its reply, and the loop goes on. What is no `Exception` (SystemExit, KeyboardInterrupt)
    leaves `run`: it is the death of the rank, for the caller to report.

    Args:
        receive: waits for the next command; None ends the loop.
        reply: sends a reply or an event, from any thread. Must not wait for anything that only this loop can do.
    """

    def __init__(
        self,
        worker: WorkerBase,
        rank: int,
        receive: Callable[[], WorkerCommand | None],
        reply: Callable[[WorkerReply], None],
    ) -> None:
        self._worker = worker
        self._rank = rank
        self._receive = receive
        self._reply = reply
        self._current: WorkerCommand | None = None
        self._epoch = 0  # of the last command
        worker.set_event_sink(self._send_event)

    @property
    def activity(self) -> str:
        """What the rank is doing, as text. Any thread may ask."""
        match self._current:
            case None:
                return "idle"
            case ExecuteModel(scheduler_output=plan):
                return f"running step {plan.step_id}"
            case RpcCall(method=method):
                return f"running {method}()"

    def run(self) -> None:
        while (command := self._receive()) is not None:
            self._current = command
            self._epoch = command.epoch
            reply = self._run_step(command) if isinstance(command, ExecuteModel) else self._run_call(command)
            self._current = None
            self._reply(reply)

    def _send_event(self, output: KVConnectorOutput) -> None:
        self._reply(WorkerEvent(epoch=self._epoch, rank=self._rank, kv_connector_output=output))

    def _run_step(self, command: ExecuteModel) -> StepReply:
        plan = command.scheduler_output
        result: ModelRunnerOutput | WorkerFailure
        try:
            result = self._worker.execute_model(plan)
            assert result.step_id == plan.step_id, f"the worker answered step {plan.step_id} with step {result.step_id}"
        except Exception as error:
            result = failure_of(error)
        return StepReply(epoch=command.epoch, step_id=plan.step_id, rank=self._rank, result=result)

    def _run_call(self, command: RpcCall) -> RpcReply:
        value, failure = None, None
        method = None if command.method.startswith("_") else getattr(self._worker, command.method, None)
        if not callable(method):
            failure = self._no_such_method(command.method)
        else:
            try:
                value = method(*command.args, **command.kwargs)
            except Exception as error:
                failure = failure_of(error)
        return RpcReply(epoch=command.epoch, call_id=command.call_id, rank=self._rank, value=value, failure=failure)

    def _no_such_method(self, name: str) -> WorkerFailure:
        cls = type(self._worker)
        known = [known for known in dir(cls) if not known.startswith("_") and callable(getattr(cls, known))]
        message = f"{cls.__name__} has no public method {name!r}; it has {', '.join(known)}"
        return WorkerFailure(type_name="AttributeError", message=message, traceback="")


def failure_of(error: BaseException) -> WorkerFailure:
    return WorkerFailure(
        type_name=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
