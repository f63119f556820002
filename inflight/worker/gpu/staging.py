"""`StagingRing`: buffers through which steps upload their entries (changes of the `DeviceState`) to the GPU.

An entry is a pair (destination, value). Each slot of the ring has pinned memory on the host, and memory on the device:

    host              take slot k, write entries              (waits only if the ring is too short)
    copy_in stream                       | pinned k -> device k |
    compute stream                                             | apply k | forward ...

Before a slot is written again, the host waits until the slot's last upload has ended. Before a slot is uploaded again, the
stream `copy_in` waits until the device has read the previous entries.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from inflight.device.accelerator import Accelerator, Event
from inflight.interface.request import Int32Array

MIN_ENTRIES = 4096
Int32Columns = Sequence[tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]]


class StagingSlot:
    """Entries [n, 2] on host and device. `write` fills the host's memory, `upload` copies it to the device."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self.is_in_use = False  # from `take` to `release`
        self._uploaded: Event | None = None
        self._read: Event
        self._allocate(MIN_ENTRIES)

    def write(self, columns: Int32Columns) -> int:
        """Write the (destinations, values) of `columns` one after another, and return the number of entries.

        Before, wait for the slot's last upload. If the slot is too small, also wait until the device has read it, and make it
        larger.
        """
        count = sum(len(destinations) for destinations, _ in columns)
        for event in (self._uploaded, self._read if count > len(self.entries) else None):
            if event is not None:
                event.synchronize()
        if count > len(self.entries):
            self._allocate(2 * count)
        start = 0
        for destinations, values in columns:
            stop = start + len(destinations)
            self._host[start:stop, 0] = destinations
            self._host[start:stop, 1] = values
            start = stop
        return count

    def upload(self, num_entries: int) -> None:
        """Copy the first entries to the device. Kernels that are queued on `compute` from now on can read them."""
        copy_in = self._device.copy_in
        compute = self._device.compute
        copy_in.wait(self._read)
        pinned = self._pinned[:num_entries]
        entries = self.entries[:num_entries]
        copy_in.enqueue(lambda: queue_copy(pinned, entries))
        self._uploaded = copy_in.record()
        compute.wait(self._uploaded)

    def release(self) -> None:
        """Free the slot. Kernels that are queued on `compute` from now on must not read its entries."""
        self._read = self._device.compute.record()
        self.is_in_use = False

    def _allocate(self, num_entries: int) -> None:
        self._pinned = self._device.pinned(2 * num_entries, torch.int32).view(num_entries, 2)
        self._host: Int32Array = self._pinned.numpy()
        self.entries = torch.empty(num_entries, 2, dtype=torch.int32, device=self._device.torch_device)
        # torch may have given `entries` memory that queued kernels still use; the first upload waits for these kernels
        self._read = self._device.compute.record()


class StagingRing:
    """
    Args:
        depth: the number of slots. If steps keep their slots, it must exceed the number of steps under way, so that `write`
            never waits.
    """

    def __init__(self, device: Accelerator, depth: int) -> None:
        self._slots = deque(StagingSlot(device) for _ in range(depth))

    def take(self) -> StagingSlot:
        """Return the slot that was taken longest ago. The step that took it must have released it."""
        self._slots.rotate(-1)
        slot = self._slots[-1]
        assert not slot.is_in_use, f"more than {len(self._slots)} steps are under way"
        slot.is_in_use = True
        return slot


def queue_copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Queue a copy on the current stream. Host memory must be pinned."""
    destination.copy_(source, non_blocking=True)
