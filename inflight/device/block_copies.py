"""`BlockCopies`: copies KV blocks between the arena of a rank and its host pool, an array in host memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.config.free_memory import available_bytes
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.errors import OutOfMemoryError


class BlockCopies(ABC):
    """Only one thread may call the methods. They return when the copies have ended.

    Attributes:
        host_pool: uint8 [num_slots, block_bytes].
    """

    host_pool: np.ndarray[Any, np.dtype[np.uint8]]

    def enter_thread(self) -> None:
        """Call this first in the thread that copies."""

    @abstractmethod
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy these blocks of the arena to these slots of the host pool."""

    @abstractmethod
    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy these slots of the host pool to these blocks of the arena."""


def block_copies(device: Device, arena: Tensor, num_slots: int) -> BlockCopies:
    """Allocates the host pool. `arena`: uint8 [num_blocks, block_bytes], on `device`.

    Raises:
        OutOfMemoryError: the host has too little free memory.
    """
    needed = num_slots * arena.shape[1]
    free = available_bytes()
    if needed > free:
        raise OutOfMemoryError(
            f"kv_offloading_size (cpu_bytes_to_use) needs {needed / 2**30:.2f} GiB of host memory for a rank, but only "
            f"{free / 2**30:.2f} GiB are free; lower it"
        )
    if isinstance(device, Accelerator):
        return AcceleratorBlockCopies(device, arena, num_slots)
    return HostBlockCopies(arena, device.allocate_arena(num_slots, arena.shape[1]))


class HostBlockCopies(BlockCopies):
    """For an arena in host memory. Numpy copies, because torch would start a second pool of threads (see `CpuDevice`)."""

    def __init__(self, arena: Tensor, host_pool: Tensor) -> None:
        self._arena = arena.numpy()
        self.host_pool = host_pool.numpy()

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            np.copyto(self.host_pool[slot], self._arena[block])

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            np.copyto(self._arena[block], self.host_pool[slot])


class AcceleratorBlockCopies(BlockCopies):
    """For an arena in the memory of a GPU. The host pool is pinned, and the copies have a stream of their own."""

    def __init__(self, device: Accelerator, arena: Tensor, num_slots: int) -> None:
        self._arena = arena
        self._stream = device.new_stream()
        self._device = device
        self._pinned = device.pinned_pages(num_slots * arena.shape[1]).view(num_slots, arena.shape[1])
        self.host_pool = self._pinned.numpy()

    def enter_thread(self) -> None:
        self._device.enter_thread()

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._copy(self._pinned, slots, self._arena, blocks)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._copy(self._arena, blocks, self._pinned, slots)

    def _copy(self, target: Tensor, to: Sequence[int], source: Tensor, of: Sequence[int]) -> None:
        @torch.inference_mode()
        def copy() -> None:
            for i, k in zip(to, of, strict=True):
                target[i].copy_(source[k], non_blocking=True)

        self._stream.enqueue(copy)
        self._stream.record().synchronize()
