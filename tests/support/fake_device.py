"""`FakeDevice`: a device whose time stands still. What is submitted runs when the test says so, in the test's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch

from inflight.device.base import Device

T = TypeVar("T")


class FakeDevice(Device):
    """`release(n)` runs the n oldest tasks; `synchronize` runs them all. `memory_bytes` is what it claims to have."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    dtypes = ("float32", "bfloat16")

    def __init__(self, *, memory_bytes: int = 1 << 30) -> None:
        self.memory_bytes = memory_bytes
        self.num_threads: int | None = None
        self.closed = False
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._tasks)

    def release(self, num_tasks: int = 1) -> None:
        for _ in range(num_tasks):
            _run(*self._tasks.popleft())

    def available_memory_bytes(self) -> int:
        return self.memory_bytes

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 0

    def allocate_arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8)

    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def submit(self, task: Callable[[], T]) -> Future[T]:
        assert not self.closed, "submit after close"
        future: Future[T] = Future()
        self._tasks.append((task, future))
        return future

    def drain(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        _run(work, future)
        return future

    def set_num_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def synchronize(self) -> None:
        self.release(len(self._tasks))

    def close(self) -> None:
        self.closed = True
        for _, future in self._tasks:
            future.cancel()
        self._tasks.clear()


def _run(work: Callable[[], T], future: Future[T]) -> None:
    future.set_running_or_notify_cancel()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
