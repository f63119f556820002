"""How an exception of a rank reaches the engine: a rank sends it as a `WorkerFailure`, and the executor raises it again."""

from __future__ import annotations

import traceback

from inflight.errors import InflightError, WorkerDiedError, error_by_name
from inflight.interface.messages import ExecuteModel, RpcCall, RpcReply, StepReply, WorkerFailure


def failure_of(error: BaseException) -> WorkerFailure:
    """Returns the message that a rank sends in place of a result."""
    return WorkerFailure(
        type_name=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        is_echo=isinstance(error, ConnectionError | TimeoutError),  # raised by `World`: another rank is gone
    )


def failed_reply(
    to: ExecuteModel | RpcCall | StepReply | RpcReply, rank: int, failure: WorkerFailure
) -> StepReply | RpcReply:
    """Returns the reply that is sent if `to`, a command or its answer, cannot be encoded."""
    kind, number = to.key
    if kind == "step":
        return StepReply(epoch=to.epoch, step_id=number, rank=rank, failure=failure)
    return RpcReply(epoch=to.epoch, call_id=number, rank=rank, failure=failure)


def named_error(rank: int, failure: WorkerFailure) -> InflightError | None:
    """The error that a rank has raised, of the same class. Its message names the rank, and a note holds the rank's traceback.
    Returns None if `error_by_name` does not find the class."""
    error = error_by_name(failure.type_name, f"rank {rank}: {failure.message}")
    if error is not None:
        error.add_note(f"On rank {rank}:\n{failure.traceback}")
    return error


def start_up_error(rank: int, failure: WorkerFailure) -> InflightError:
    """Returns the error that the executor raises if a rank could not start. An error of the user keeps its class; any other
    error is the death of the rank."""
    if (error := named_error(rank, failure)) is not None:
        return error
    message = f"rank {rank} could not start: {failure.type_name}: {failure.message}"
    return WorkerDiedError(message, rank=rank, worker_traceback=failure.traceback)
