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

    Everything is computed in stages that are given to `submit`, loading and profiling too: on a CPU only the thread that runs
    stages has a thread pool. The caller does not touch the data of a stage until its future is done.
    """

    kind: str
    torch_device: torch.device
    dtypes: tuple[str, ...]  # names in `TORCH_DTYPES` that models may be served in, the preferred one first

    @abstractmethod
    def available_memory_bytes(self) -> int:
        """Bytes that could be allocated on the device now, without swapping."""

    def budget_bytes(self, utilization: float) -> int:
        """How many bytes the engine may take now, if `utilization` is its share."""
        return int(self.available_memory_bytes() * utilization)

    @abstractmethod
    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Call `work` and return the most bytes that it used at once, beyond those in use before. Called in a stage."""

    @abstractmethod
    def allocate_arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """uint8 `[num_blocks, block_bytes]`, zeroed, its start aligned to `ARENA_ALIGNMENT`.

        The memory lives as long as the tensor or any view of it. Raises `OutOfMemoryError`.
        """

    @abstractmethod
    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:  # Any: of every shape and number type
        """`array` on the device. The caller may change `array` as soon as this returns."""

    @abstractmethod
    def submit(self, stage: Callable[[], T]) -> Future[T]:
        """Run `stage` after all stages submitted before it; the future gets its result or exception.

        Stages run one at a time, in the order of the calls: on a thread of their own, or at once if they only launch. A stage
        that raises does not stop later ones. A stage sets torch's thread-local modes (`inference_mode`) itself.
        """

    @abstractmethod
    def drain(self, work: Callable[[], T]) -> Future[T]:
        """Call `work` once the device has finished everything that it was given before: copies to the host, for example.

        Called by stages; later stages need not wait for it. The calls run one at a time, in order, on a thread of their own.
        `close` waits for those that are queued.
        """

    @abstractmethod
    def set_num_threads(self, num_threads: int) -> None:
        """The number of threads that stages compute with, from the next stage on. The calling thread keeps its own setting."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything submitted has ended, with or without an error."""

    @abstractmethod
    def close(self) -> None:
        """Drop the stages that have not begun, and wait for the running stage and for the drain thread. Idempotent; nothing may
        be submitted afterwards."""
