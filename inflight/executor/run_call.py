"""`run_call`: calls a method of a rank's worker, and makes the reply."""

from collections.abc import Callable
from typing import Any

from inflight.executor.failures import failure_of
from inflight.interface.messages import RpcCall, RpcReply, WorkerFailure
from inflight.interface.worker import WorkerBase


def run_call(worker: WorkerBase | None, rank: int, command: RpcCall) -> RpcReply:
    method = None if command.method.startswith("_") else getattr(worker, command.method, None)
    if callable(method):
        return reply_of(rank, command, lambda: method(*command.args, **command.kwargs))
    failure = _no_such_method(type(worker), command.method)
    return RpcReply(epoch=command.epoch, call_id=command.call_id, rank=rank, failure=failure)


def reply_of(rank: int, command: RpcCall, call: Callable[[], Any]) -> RpcReply:  # Any: each method has its own result
    value, failure = None, None
    try:
        value = call()
    except Exception as error:
        failure = failure_of(error)
    return RpcReply(epoch=command.epoch, call_id=command.call_id, rank=rank, value=value, failure=failure)


def _no_such_method(cls: type, name: str) -> WorkerFailure:
    known = [known for known in dir(cls) if not known.startswith("_") and callable(getattr(cls, known))]
    message = f"{cls.__name__} has no public method {name!r}; its public methods are {', '.join(known)}"
    return WorkerFailure(type_name="AttributeError", message=message, traceback="")
