"""`RankCalls`: each call reaches the worker's method with its arguments, beside the steps."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import pytest

from inflight.engine.core.rank_calls import RankCalls
from inflight.interface.worker import WorkerBase

if TYPE_CHECKING:
    from inflight.executor.step_protocol import StepProtocol

CALLS: dict[str, tuple[Any, ...]] = {
    "save": (7, [1, 2], [3, 4], [[b"a", b"b"]]),
    "stored": (7,),
    "load": ([3, 4], [1, 2]),
    "fetch": ([b"a"], [3], [(b"", 0)]),
    "touch": ([b"a"],),
    "restore": ([b"a"], [3]),
}


class Executor:
    """Calls the method of a worker that notes its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...], *, non_block: bool, beside: bool) -> Future[Any]:
        assert non_block and beside
        bound = inspect.signature(getattr(WorkerBase, method)).bind(None, *args)
        self.calls.append((method, dict(list(bound.arguments.items())[1:])))
        future: Future[Any] = Future()
        future.set_result([f"of {method}"])
        return future


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_the_workers_method_with_these_arguments(name: str) -> None:
    executor = Executor()
    call = getattr(RankCalls(cast("StepProtocol", executor)), name)
    assert call(*CALLS[name]).result() == [f"of kv_{name}"]
    ((method, arguments),) = executor.calls
    assert method == f"kv_{name}" and list(arguments) == list(inspect.signature(call).parameters)
    assert tuple(arguments.values()) == CALLS[name]
