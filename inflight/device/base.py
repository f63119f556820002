"""`Device`: the interface of the hardware that one rank runs on."""

from __future__ import annotations

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

    Everything is computed in stages: functions that the caller passes to `submit`. Loading and profiling are stages, too: on a
    CPU, code can use several threads only in the thread that runs stages (see `CpuDevice`). The caller must not touch the data
    of a stage before the stage's future is done.
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
        does not count. Called in a stage."""

    @abstractmethod
    def allocate_arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """Allocates a zeroed tensor, uint8 `[num_blocks, block_bytes]`, which starts at a multiple of `ARENA_ALIGNMENT` bytes.

        The memory is freed when the tensor and all its views are gone. Raises `OutOfMemoryError`.
        """

    @abstractmethod
    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:  # Any: of every shape and number type
        """Copies `array` to the device. The caller may change `array` as soon as this method has returned."""

    @abstractmethod
    def submit(self, stage: Callable[[], T]) -> Future[T]:
        """Runs `stage` after all earlier stages. The future gets the stage's result or exception.

        Stages run one at a time, in the order of the calls. On a CPU, a thread of the device runs the stages. On an
        accelerator, a stage only queues operations for the device, so it runs at once in the caller's thread. If a stage raises
        an exception, later stages still run. A stage sets torch's thread-local modes (`inference_mode`) itself.
        """

    @abstractmethod
    def drain(self, work: Callable[[], T]) -> Future[T]:
        """Calls `work` when the device has finished all earlier operations, for example copies to the host.

        Stages call `drain`. Later stages need not wait for `work`. Another thread of the device makes the calls of `work`, one
        at a time, in the order of the calls of `drain`. `close` waits for the queued calls.
        """

    @abstractmethod
    def set_num_threads(self, num_threads: int) -> None:
        """Sets the number of threads that stages use, from the next stage on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all submitted stages have ended, with or without an error."""

    @abstractmethod
    def close(self) -> None:
        """Drops the stages that have not begun. Waits for the running stage and for all work of `drain`. Idempotent. After
        this call, `submit` must not be called."""
