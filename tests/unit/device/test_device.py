"""What `Device` promises, of the CPU's and of the fake one alike."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest
import torch

from inflight.device import host_memory
from inflight.device.base import ARENA_ALIGNMENT, Device
from inflight.device.cpu import CpuDevice
from inflight.device.long_calls import LONG_CALLS
from inflight.device.selector import get_device
from inflight.errors import ConfigError, OutOfMemoryError
from tests.support.fake_device import FakeDevice

MIB = 1 << 20


@pytest.fixture(params=[CpuDevice, FakeDevice])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device: Device = request.param()
    yield device
    device.close()


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def test_attributes(device: Device) -> None:
    assert device.available_memory_bytes() > MIB


def test_an_arena_is_zeroed_aligned_and_writable(device: Device) -> None:
    arena = device.allocate_arena(7, 192)
    assert arena.shape == (7, 192)
    assert arena.dtype == torch.uint8
    assert arena.data_ptr() % ARENA_ALIGNMENT == 0
    assert not arena.any()
    arena.view(torch.float32).fill_(1.5)
    assert arena.view(torch.float32).sum() == 1.5 * 7 * 48


def test_a_staged_array_is_the_callers_again(device: Device) -> None:
    array = np.arange(5, dtype=np.int32)
    tensor = device.to_device(array)
    array.fill(-1)
    assert tensor.dtype == torch.int32
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_stages_run_in_order_and_one_failure_stops_no_other(device: Device) -> None:
    ran: list[int] = []

    def task(i: int) -> int:
        ran.append(i)
        if i == 3:
            raise ValueError("task 3")
        return i * i

    futures = [device.submit(lambda i=i: task(i)) for i in range(8)]
    device.synchronize()
    assert ran == list(range(8))
    assert [f.result() for i, f in enumerate(futures) if i != 3] == [i * i for i in range(8) if i != 3]
    with pytest.raises(ValueError, match="task 3"):
        futures[3].result()


def test_close_is_idempotent_and_ends_submission(device: Device) -> None:
    device.close()
    device.close()
    with pytest.raises(AssertionError, match="after close"):
        device.submit(lambda: None)


def test_closing_drops_what_has_not_begun(cpu: CpuDevice) -> None:
    begun, leave = threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        leave.wait()
        return "done"

    running, waiting = cpu.submit(first), cpu.submit(lambda: "never")
    begun.wait()
    closing = threading.Thread(target=cpu.close)
    closing.start()
    while not waiting.cancelled():
        time.sleep(0.001)
    leave.set()
    closing.join()
    assert running.result() == "done"


def test_stages_have_a_thread_of_their_own(cpu: CpuDevice) -> None:
    names = {cpu.submit(threading.get_ident).result() for _ in range(3)}
    assert len(names) == 1
    assert threading.get_ident() not in names


def test_only_stages_have_a_pool(cpu: CpuDevice) -> None:
    before = torch.get_num_threads()
    try:
        for num_threads in (2, 1, 3):
            cpu.set_num_threads(num_threads)
            assert cpu.submit(torch.get_num_threads).result() == num_threads
            assert cpu.submit(lambda: cpu.drain(torch.get_num_threads)).result().result() == 1
            assert torch.get_num_threads() == before, "the calling thread's is its own"
    finally:
        torch.set_num_threads(before)


def test_an_arena_takes_memory_when_touched_and_gives_it_back(cpu: CpuDevice) -> None:
    gc.collect()  # nothing that earlier tests have left is freed between two looks
    before = host_memory.resident_bytes()
    arena = cpu.allocate_arena(64, 4 * MIB)
    assert host_memory.resident_bytes() - before < 32 * MIB
    view = arena[:32].view(torch.float32)
    view.fill_(1.0)
    assert host_memory.resident_bytes() - before > 100 * MIB
    del arena
    assert view[31, -1] == 1.0, "a view keeps the memory"
    del view
    gc.collect()
    assert host_memory.resident_bytes() - before < 32 * MIB


def test_an_arena_beyond_the_address_space_is_refused(cpu: CpuDevice) -> None:
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory_bytes"):
        cpu.allocate_arena(1 << 30, 1 << 30)


def test_the_peak_counts_what_was_freed_again(cpu: CpuDevice) -> None:
    peak = cpu.measure_peak_bytes(lambda: torch.ones(64 * MIB, dtype=torch.uint8).sum())
    assert peak > 60 * MIB


def test_the_fake_runs_nothing_before_it_is_released() -> None:
    fake = FakeDevice()
    first, second = fake.submit(lambda: 1), fake.submit(lambda: 2)
    assert (first.done(), second.done(), fake.num_waiting) == (False, False, 2)
    fake.release()
    assert (first.result(), second.done(), fake.num_waiting) == (1, False, 1)
    fake.close()
    assert second.cancelled()


def test_get_device() -> None:
    device = get_device("cpu")
    assert device.kind == "cpu"
    device.close()
    with pytest.raises(ConfigError, match=r"device is 'tpu'; use 'cpu', 'cuda', or 'auto'"):
        get_device("tpu")


def test_a_rank_without_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"rank 1 .*torch sees 1 "):
        get_device("cuda", 1)


def test_the_drain_thread_gets_work_when_the_next_task_begins_a_long_call(cpu: CpuDevice) -> None:
    """Tasks like the phases of steps: a forward makes a long call, a sample drains. The next forward waits already."""
    gate, seen = threading.Event(), list[str]()
    drained: list[Future[None]] = []

    def forward(name: str) -> None:
        seen.append(f"{name} before")
        time.sleep(0.01)  # a drain thread that had the work would do it now
        LONG_CALLS.before()
        if drained:
            drained[-1].result(timeout=300)
        seen.append(f"{name} after")

    def sample(name: str) -> None:
        drained.append(cpu.drain(lambda: seen.append(name)))

    cpu.submit(gate.wait)
    tasks = [cpu.submit(partial(forward, "forward 0")), cpu.submit(partial(sample, "drain 0"))]
    tasks.append(cpu.submit(partial(forward, "forward 1")))
    gate.set()
    for task in tasks:
        task.result(timeout=300)
    assert seen == ["forward 0 before", "forward 0 after", "forward 1 before", "drain 0", "forward 1 after"]


@pytest.mark.parametrize("calls", [0, 1], ids=["no long calls", "a long call before"])
def test_work_is_handed_over_at_the_latest_when_the_next_task_ends(cpu: CpuDevice, calls: int) -> None:
    """Without long calls, at once: the next task here waits for the work. Otherwise the next task may be one without."""
    gate, drained = threading.Event(), list[Future[int]]()

    def sample() -> None:
        for _ in range(calls):
            LONG_CALLS.before()
        drained.append(cpu.drain(lambda: 7))

    def other() -> int:
        return drained[-1].result(timeout=300) if calls == 0 else 7

    cpu.submit(gate.wait)
    cpu.submit(sample)
    task = cpu.submit(other)
    gate.set()
    assert task.result(timeout=300) == 7
    assert drained[-1].result(timeout=300) == 7


def test_work_that_no_task_follows_is_handed_over_and_its_error_is_kept(cpu: CpuDevice) -> None:
    def sample() -> Future[float]:
        LONG_CALLS.before()
        return cpu.drain(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        cpu.submit(sample).result().result(timeout=300)
    with pytest.raises(AssertionError, match="only tasks"):
        cpu.drain(lambda: None)
