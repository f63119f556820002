"""With how many threads a model of transformers computes beside busy programs. The clock, the waiting and the idle time are the
test's, but for the test of real threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import cast

import pytest
import torch

from inflight.device.cpu import CpuDevice
from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.worker.fewer_threads import (
    DECISION_SECONDS,
    MOST_PATIENCE,
    PAUSE_SECONDS,
    ComputeThreads,
    FewerThreads,
    thread_ids,
)

STEP = 0.02  # seconds between two calls


class Threads:
    """In place of `ComputeThreads`."""

    def __init__(self, num_threads: int) -> None:
        self.cores = list(range(num_threads))
        self.ids = [10 + core for core in self.cores]
        self.used: list[int] = []

    def use(self, num_threads: int) -> None:
        self.used.append(num_threads)
        self.ids = self.ids[:num_threads] + [20 + len(self.used)] * max(0, num_threads - len(self.ids))


class Machine:
    """Busy programs take one core each: first those that no thread of the engine uses. The thread of a taken core waits for
    half of its time."""

    def __init__(self, num_threads: int, *, serial: float = 0.0) -> None:
        """serial: the share of a step in which the leader computes alone."""
        self.threads, self.serial, self.num_busy = Threads(num_threads), serial, 0
        self.now, self.waited, self.idle = 100.0, dict.fromkeys(range(100), 7.0), 3.0
        self.policy = FewerThreads(
            cast("ComputeThreads", self.threads),
            self.waited.__getitem__,
            lambda thread_id: 0,
            lambda core: self.idle / num_threads,
            lambda: self.now,
        )

    def run(self, seconds: float, *, num_busy: int) -> list[int]:
        """The numbers of threads that were chosen."""
        self.threads.used.clear()
        for _ in range(round(seconds / STEP)):
            num_free = len(self.threads.cores) - self.policy.num_threads
            num_taken = max(0, num_busy - num_free)
            for thread in self.threads.ids[:num_taken]:
                self.waited[thread] += STEP / 2
            self.idle += STEP * max(0, num_free - num_busy)
            self.idle += STEP * self.serial * max(0, self.policy.num_threads - 1 - num_taken)
            self.now += STEP
            self.policy.update()
        return self.threads.used

    def pause(self, seconds: float, *, num_busy: int) -> list[int]:
        """Then a step begins. Returns the numbers of threads that were chosen."""
        self.threads.used.clear()
        self.idle += seconds * max(0, len(self.threads.cores) - num_busy)
        self.now += seconds
        self.policy.begin()
        return self.threads.used


def test_a_core_is_left_to_a_busy_program_until_it_ends() -> None:
    machine = Machine(2)
    assert machine.run(5.0, num_busy=0) == []
    assert machine.run(2 * DECISION_SECONDS, num_busy=1) == [1]
    assert machine.run(5.0, num_busy=1) == []
    assert machine.run(2 * DECISION_SECONDS, num_busy=0) == [2]
    assert machine.run(5.0, num_busy=0) == []


def test_at_least_half_of_the_threads_compute() -> None:
    machine = Machine(8)
    assert machine.run(5.0, num_busy=3) == [7, 6, 5]
    assert machine.run(5.0, num_busy=8) == [4]
    assert machine.run(5.0, num_busy=2) == [5, 6]
    assert Machine(5).run(5.0, num_busy=5) == [4, 3]


def test_attempts_in_vain_become_rare() -> None:
    """Serial parts of steps leave cores idle, though another program takes one."""
    machine = Machine(4, serial=0.6)
    used = machine.run(60.0, num_busy=1)
    assert used[0] == 3 and used[1::2] == [4] * len(used[1::2]) and used[2::2] == [3] * len(used[2::2])
    windows = 60.0 / DECISION_SECONDS
    assert len(used[1::2]) <= windows / MOST_PATIENCE + 6
    assert machine.run(2 * MOST_PATIENCE * DECISION_SECONDS, num_busy=0)[-1] == 4
    machine.run(0.3, num_busy=1)
    assert machine.run(0.5, num_busy=0) == [4], "after a success, the next attempt comes at once"


def test_the_first_step_after_a_pause_leaves_out_the_cores_that_were_busy() -> None:
    machine = Machine(4)
    assert machine.pause(5.0, num_busy=4) == [], "before the first step, the engine itself is what computes"
    machine.run(1.0, num_busy=0)
    assert machine.pause(PAUSE_SECONDS / 2, num_busy=1) == []
    assert machine.pause(1.0, num_busy=1) == [3]
    assert machine.run(1.0, num_busy=1) == []
    assert machine.pause(1.0, num_busy=4) == [2], "at least half of the threads compute"
    machine.run(STEP, num_busy=4)
    assert machine.pause(1.0, num_busy=0) == [4]
    assert machine.run(1.0, num_busy=0) == []


def test_short_waits_change_nothing() -> None:
    machine = Machine(2)
    for _ in range(50):  # another program computes for a fifth of the time
        assert machine.run(0.08, num_busy=0) == [] and machine.run(0.02, num_busy=1) == []


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made, before = CpuDevice(), torch.get_num_threads()
    yield made
    made.close()
    torch.set_num_threads(before)


@pytest.mark.skipif(load_kernels() is None, reason="needs the C++ kernels")
def test_real_threads_are_left_out_and_bound_again(device: CpuDevice) -> None:
    """Three threads, more than many machines have cores: the last two share one."""
    usable = sorted(os.sched_getaffinity(0))
    cores = [usable[0], usable[-1], usable[-1]]
    device.set_num_threads(3)
    before, leader = thread_ids(), device.submit(_compute).result()
    threads = ComputeThreads(
        device, cast("KernelLibrary", load_kernels()), [leader, *sorted(thread_ids() - before)], cores
    )
    assert len(threads.ids) == 3
    for num_threads in (3, 2, 1, 2, 3):
        threads.use(num_threads)
        assert device.submit(torch.get_num_threads).result() == num_threads
        assert threads.ids[0] == leader and len(threads.ids) >= num_threads
        assert device.submit(_usable).result() == usable, "the leader may use all cores"
    assert len(threads.ids) == 3 and set(threads.ids) <= thread_ids()
    assert [sorted(os.sched_getaffinity(each)) for each in threads.ids[1:]] == [[usable[-1]]] * 2


def _compute() -> int:
    torch.zeros(1 << 17, dtype=torch.float32, device="cpu").add_(1)
    return threading.get_native_id()


def _usable() -> list[int]:
    return sorted(os.sched_getaffinity(0))
