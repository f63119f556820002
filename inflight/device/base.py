"""`Device`: what the data plane asks of the hardware it runs on."""

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

    Work reaches the device through `submit`, loading and profiling too: on a CPU only the thread that runs stages has a thread
    pool. The caller touches what a stage works on again when its future is done.
    """

    kind: str
    torch_device: torch.device
    dtypes: tuple[str, ...]  # names in `TORCH_DTYPES` that models may be served in, the preferred one first

    @abstractmethod
    def available_memory_bytes(self) -> int:
        """Bytes that could be allocated on the device now, without pushing anything out."""

    def budget_bytes(self, utilization: float) -> int:
        """How many of the bytes available now the engine may take, if it is given this share."""
        return int(self.available_memory_bytes() * utilization)

    @abstractmethod
    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work` here and now, in a stage; the bytes in use at its highest point, above those in use before it."""

    @abstractmethod
    def allocate_arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """uint8 `[num_blocks, block_bytes]`, zeroed, its start aligned to `ARENA_ALIGNMENT`.

        The memory lives as long as the tensor or any view of it. Raises `OutOfMemoryError`.
        """

    @abstractmethod
    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:  # Any: of every shape and number type
        """`array` on the device. It is the caller's again when this returns: reuse of a staging buffer is safe."""

    @abstractmethod
    def submit(self, stage: Callable[[], T]) -> Future[T]:
        """Run `stage` behind all stages submitted before it; its result or exception arrives in the future.

        Stages run one at a time, in the order of the calls, on a thread of their own, or at once where they only launch. A
        stage that raises does not stop those behind it. Torch's thread-local modes (`inference_mode`) are the stage's to set.
        """

    @abstractmethod
    def drain(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` once the device has done what it was given before this call: copies to the host, and what they feed.

        For stages to call: those behind need not wait. Work runs one at a time, in the order of the calls, on a thread of its
        own, also work that `close` finds waiting.
        """

    @abstractmethod
    def set_num_threads(self, num_threads: int) -> None:
        """The size of the pool that stages compute with, from the next one on. The calling thread is left as it is."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when everything submitted has ended, well or not."""

    @abstractmethod
    def close(self) -> None:
        """Drop the stages that have not begun; wait for the one that has, and for the drain thread. Idempotent; nothing may be
        submitted after."""
