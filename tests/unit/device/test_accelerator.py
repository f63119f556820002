"""What all accelerators share: tasks that run at once, and recordings without garbage collection."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from inflight.device.accelerator import no_garbage_collection
from tests.support.fake_gpu import FakeGpu


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    device = FakeGpu()
    yield device
    device.close()


def test_a_task_runs_at_once_in_the_callers_thread(gpu: FakeGpu) -> None:
    future = gpu.submit(threading.get_ident)
    assert future.done() and future.result() == threading.get_ident()


def test_an_error_of_a_task_is_in_its_future(gpu: FakeGpu) -> None:
    def fail() -> int:
        raise ValueError("broken")

    future = gpu.submit(fail)
    with pytest.raises(ValueError, match="broken"):
        future.result()
    assert gpu.submit(lambda: 3).result() == 3


def test_nothing_is_collected_while_a_graph_is_recorded() -> None:
    class Node:
        own: Node

    def cycle() -> weakref.ref[Node]:
        node = Node()
        node.own = node
        return weakref.ref(node)

    before = cycle()
    assert gc.isenabled()
    with no_garbage_collection():
        assert not gc.isenabled()
        assert before() is None, "what is garbage already is collected before"
    assert gc.isenabled()


def test_collection_goes_on_only_if_it_was_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)
    with pytest.raises(KeyError), no_garbage_collection():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_share_of_the_free_memory(gpu: FakeGpu) -> None:
    assert gpu.budget_bytes(0.25) == gpu.memory_bytes // 4
