"""`BlockCopies`: the named blocks are copied and no others, and a copy has ended when the call returns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inflight.device import block_copies
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.device.block_copies import AcceleratorBlockCopies, HostBlockCopies
from inflight.device.cpu import CpuDevice
from inflight.errors import OutOfMemoryError
from tests.support.fake_device import FakeDevice
from tests.support.fake_gpu import FakeGpu

NUM_BLOCKS, NUM_SLOTS, BLOCK_BYTES = 5, 7, 64
LINK_FIRST, LINK_LAST = ("link", "copy_in", "copy_out", "compute"), ("compute", "copy_in", "copy_out", "link")


@pytest.fixture(params=["cpu", "fake", "gpu", "eager gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = {"cpu": CpuDevice, "fake": FakeDevice, "gpu": FakeGpu, "eager gpu": lambda: FakeGpu(eager=True)}
    device: Device = made[request.param]()
    yield device
    device.close()


def numbered(device: Device) -> torch.Tensor:
    """An arena whose block n has the byte n + 1 everywhere."""
    arena = device.allocate_arena(NUM_BLOCKS, BLOCK_BYTES)
    arena.copy_(torch.arange(1, NUM_BLOCKS + 1, dtype=torch.uint8)[:, None].expand(-1, BLOCK_BYTES))
    return arena


def bytes_of(rows: np.ndarray | torch.Tensor) -> list[int]:
    """The byte of each row, which is the same everywhere in the row."""
    found = [set(row.tolist()) for row in rows]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


def test_blocks_go_to_slots_and_back(device: Device) -> None:
    arena = numbered(device)
    copies = block_copies.block_copies(device, arena, NUM_SLOTS)
    assert isinstance(copies, AcceleratorBlockCopies if isinstance(device, Accelerator) else HostBlockCopies)
    assert (copies.host_pool.shape, copies.host_pool.dtype) == ((NUM_SLOTS, BLOCK_BYTES), np.uint8)
    copies.host_pool[:] = 90
    copies.save([4, 1], [2, 6])
    assert bytes_of(copies.host_pool) == [90, 90, 5, 90, 90, 90, 2]
    assert bytes_of(arena) == [1, 2, 3, 4, 5]
    copies.host_pool[6] = 77
    copies.load([6, 2], [0, 3])
    assert bytes_of(arena) == [77, 2, 3, 5, 5]
    assert bytes_of(copies.host_pool) == [90, 90, 5, 90, 90, 90, 77]


def test_lists_of_other_lengths_are_a_defect(device: Device) -> None:
    copies = block_copies.block_copies(device, numbered(device), NUM_SLOTS)
    with pytest.raises(ValueError, match="argument"):
        copies.save([4, 1], [2])


@pytest.mark.parametrize("order", [LINK_FIRST, LINK_LAST])
def test_copies_of_a_gpu_have_a_stream_of_their_own(order: tuple[str, ...]) -> None:
    """They do not wait for the steps, unless the device runs the steps first."""
    device, has_computed = FakeGpu(order=order), list[bool]()
    arena = numbered(device)
    copies = block_copies.block_copies(device, arena, NUM_SLOTS)
    device.compute.enqueue(lambda: has_computed.append(True))
    copies.save([4], [2])
    copies.load([2], [0])
    assert bytes_of(arena) == [5, 2, 3, 4, 5]
    assert has_computed == ([True] if order == LINK_LAST else [])
    device.close()


def test_a_host_pool_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    needed, arena = NUM_SLOTS * BLOCK_BYTES, numbered(device)
    monkeypatch.setattr(block_copies, "available_bytes", lambda: needed - 1)
    with pytest.raises(OutOfMemoryError, match=r"^kv_offloading_size \(cpu_bytes_to_use\)"):
        block_copies.block_copies(device, arena, NUM_SLOTS)
    monkeypatch.setattr(block_copies, "available_bytes", lambda: needed)
    assert len(block_copies.block_copies(device, arena, NUM_SLOTS).host_pool) == NUM_SLOTS
