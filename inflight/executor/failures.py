"""How an exception of a rank gets to the engine: the rank sends a `WorkerFailure`, and the executor makes an error of it."""

import traceback

from inflight.errors import InflightError, PeerError, WorkerDiedError, error_by_name
from inflight.interface.messages import ExecuteModel, RpcCall, RpcReply, StepReply, WorkerFailure


def failure_of(error: BaseException) -> WorkerFailure:
    """Returns the message that a rank sends instead of a result."""
    return WorkerFailure(
        type_name=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        is_echo=isinstance(error, ConnectionError | TimeoutError),  # `World` raises these if another rank is gone
        lost_ranks=_lost_ranks(error),
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's message. The rest is the worker's traceback, which is in the log."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _lost_ranks(error: BaseException | None) -> tuple[int, ...]:
    """The ranks of the `PeerError` that is `error`, or from which `error` was raised."""
    while error is not None and not isinstance(error, PeerError):
        error = error.__cause__
    return () if error is None else error.ranks


def failed_reply(
    to: ExecuteModel | RpcCall | StepReply | RpcReply, rank: int, failure: WorkerFailure
) -> StepReply | RpcReply:
    """Returns a reply with `failure`. It is sent when a command, or the reply to a command, cannot be encoded. `to` is that
    command or that reply."""
    kind, number = to.key
    if kind == "step":
        return StepReply(epoch=to.epoch, step_id=number, rank=rank, failure=failure)
    return RpcReply(epoch=to.epoch, call_id=number, rank=rank, failure=failure)


def named_error(rank: int, failure: WorkerFailure) -> InflightError | None:
    """Returns an error of the class that the rank has raised. Its message names the rank, and a note contains the rank's
    traceback. Returns None if `error_by_name` does not find the class."""
    error = error_by_name(failure.type_name, f"rank {rank}: {failure.message}")
    if error is not None:
        error.add_note(f"On rank {rank}:\n{failure.traceback}")
    return error


def start_up_error(rank: int, failure: WorkerFailure, num_ranks: int) -> InflightError:
    """Returns the error that the executor raises if a rank could not start. It has the class that the rank raised if Inflight
    has this class. Otherwise it is a `WorkerDiedError`. If there is only one rank, the message is the one that it raised."""
    is_only = num_ranks == 1
    error = error_by_name(failure.type_name, failure.message) if is_only else named_error(rank, failure)
    if error is not None:
        return error
    message = f"rank {rank} could not start: {failure.type_name}: {failure.message}"
    return WorkerDiedError(
        message, rank=rank, worker_traceback=failure.traceback, is_echo=failure.is_echo, lost_ranks=failure.lost_ranks
    )
