"""Staging is written, copied and read by three that do not wait for each other. Each wait is taken out once, and missed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from inflight.device.accelerator import Event
from inflight.worker.gpu.staging import MIN_ENTRIES, StagingRing, StagingSlot
from tests.support.fake_gpu import COMPUTE_FIRST, COPY_OUT_FIRST, FakeEvent, FakeGpu, FakeStream


def uploads(device: FakeGpu, ring: StagingRing, count: int, *, num_entries: int = 3) -> list[list[int]]:
    """What the device finds in the slot's entries, upload after upload; the host never looks."""
    found: list[torch.Tensor] = []
    for i in range(count):
        slot = ring.take()
        slot.write([(np.arange(num_entries), np.full(num_entries, i))])
        slot.upload(num_entries)
        entries = slot.entries
        device.compute.enqueue(lambda entries=entries: found.append(entries[:num_entries, 1].clone()))  # type: ignore[misc]
        slot.release()
    device.run_all()
    return [sorted(set(values.tolist())) for values in found]


@pytest.mark.parametrize("order", [COPY_OUT_FIRST, COMPUTE_FIRST])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_device_reads_what_was_staged_for_each_step(order: tuple[str, ...], depth: int) -> None:
    device = FakeGpu(order=order)
    assert uploads(device, StagingRing(device, depth), 7) == [[i] for i in range(7)]


def test_a_slot_grows_behind_those_that_read_it() -> None:
    device = FakeGpu()
    ring = StagingRing(device, 1)
    assert uploads(device, ring, 2) == [[0], [1]]
    assert uploads(device, ring, 2, num_entries=MIN_ENTRIES + 1) == [[0], [1]]


def no_wait_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: None)


def no_wait_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    _skip(monkeypatch, "copy_in")


def no_wait_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    _skip(monkeypatch, "compute")


def _skip(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wait = FakeStream.wait

    def wait_unless(stream: FakeStream, event: Event) -> None:
        if stream.name != name:
            wait(stream, event)

    monkeypatch.setattr(FakeStream, "wait", wait_unless)


@pytest.mark.parametrize("mutation", [no_wait_of_the_host, no_wait_of_the_copy, no_wait_for_the_copy])
def test_each_wait_is_needed(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    found = []
    for order in (COPY_OUT_FIRST, COMPUTE_FIRST):
        device = FakeGpu(order=order)
        found.append(uploads(device, StagingRing(device, 2), 7))
    assert found != [[[i] for i in range(7)]] * 2


def test_a_slot_may_be_written_before_it_was_ever_uploaded() -> None:
    slot = StagingSlot(FakeGpu())
    slot.write([(np.array([1]), np.array([2])), (np.array([3]), np.array([4]))])
    slot.upload(2)
    slot.release()
    slot._device.run_all()  # type: ignore[attr-defined]
    assert slot.entries[:2].tolist() == [[1, 2], [3, 4]]
