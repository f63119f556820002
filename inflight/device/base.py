"""`Device`: the interface of the hardware that one rank runs on."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

ARENA_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class Device(ABC):
    """One rank's device. The worker owns it and closes it.

    Everything is computed in tasks: functions that the caller passes to `submit`. The forward of a step is one, its sample too.
    Loading and profiling are tasks, too: on a CPU, code can use several threads only in the thread that runs tasks (see
    `CpuDevice`). The caller must not touch the data of a task before the task's future is done.
    """

    kind: str
    torch_device: torch.device

    @abstractmethod
    def available_memory_bytes(self) -> int:
        """Returns the bytes that could be allocated on the device now, without swapping."""

    def budget_bytes(self, utilization: float) -> int:
        """Returns how many more bytes the engine may use now, if its share of the device's memory is `utilization`."""
        return int(self.available_memory_bytes() * utilization)

    @abstractmethod
    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Calls `work` and returns the most bytes of memory that `work` uses at once. Memory that was in use before the call
        does not count. Called in a task."""

    @abstractmethod
    def allocate_arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """Allocates a zeroed tensor, uint8 `[num_blocks, block_bytes]`, which starts at a multiple of `ARENA_ALIGNMENT` bytes.

        The memory is freed when the tensor and all its views are gone. Raises `OutOfMemoryError`.
        """

    @abstractmethod
    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:  # Any: of every shape and number type
        """Copies `array` to the device. The caller may change `array` as soon as this method has returned."""

    @abstractmethod
    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Runs `task` after all earlier tasks. The future gets the task's result or exception.

        Tasks run one at a time, in the order of the calls. On a CPU, a thread of the device runs the tasks. On an
        accelerator, a task only queues operations for the device, so it runs at once in the caller's thread. If a task raises
        an exception, later tasks still run. A task sets torch's thread-local modes (`inference_mode`) itself.
        """

    @abstractmethod
    def drain(self, work: Callable[[], T]) -> Future[T]:
        """Calls `work` when the device has finished all earlier operations, for example copies to the host.

        Tasks call `drain`. Later tasks need not wait for `work`. Another thread of the device makes the calls of `work`, one
        at a time, in the order of the calls of `drain`. `close` waits for the queued calls.
        """

    @abstractmethod
    def set_num_threads(self, num_threads: int) -> None:
        """Sets the number of threads that tasks use, from the next task on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all submitted tasks have ended, with or without an error."""

    @abstractmethod
    def close(self) -> None:
        """Drops the tasks that have not begun. Waits for the running task and for all work of `drain`. Idempotent. After
        this call, `submit` must not be called."""
