"""When a rank's only thread leaves its core, and when it comes back. The clock and the waiting are the test's."""

from __future__ import annotations

import os
import threading
from itertools import pairwise

from inflight.worker.core_sharing import CALM_SECONDS, CoreBinding, CoreSharing, waited_seconds

STEP = 0.01  # seconds between two observations


class Machine:
    """Observes a thread at every step; in each step it waits for `share` of the time."""

    def __init__(self) -> None:
        self.sharing, self.now, self.waited = CoreSharing(), 100.0, 7.0
        assert not self.sharing.observe(self.now, self.waited)

    def run(self, seconds: float, *, share: float) -> list[bool]:
        states = []
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self.waited += share * STEP
            states.append(self.sharing.observe(self.now, self.waited))
        return states


def test_company_is_noticed_within_50_ms_and_forgotten_within_200_ms() -> None:
    machine = Machine()
    assert not any(machine.run(1.0, share=0.05))
    assert machine.run(0.05, share=0.5)[-1]
    assert all(machine.run(1.0, share=0.3)), "unbound, the thread waits less, but it still has company"
    states = machine.run(0.2, share=0.0)
    assert states[0] and not states[-1]
    assert not any(machine.run(1.0, share=0.0))


def test_no_flapping() -> None:
    machine = Machine()
    machine.run(0.05, share=0.5)
    for _ in range(20):  # a neighbour that pauses for less than the calm
        assert all(machine.run(CALM_SECONDS / 2, share=0.0))
        assert all(machine.run(0.05, share=0.5))
    states = []
    for _ in range(10):
        states += machine.run(0.3, share=0.5) + machine.run(0.3, share=0.0)
    changes = sum(before != after for before, after in pairwise(states))
    assert changes == 19, "a neighbour that comes and goes every 300 ms: one change each time"


def test_an_idle_engine_is_calm_and_one_glance_decides_nothing() -> None:
    machine = Machine()
    machine.run(0.05, share=0.5)
    machine.now += 10.0
    assert not machine.sharing.observe(machine.now, machine.waited)
    assert not machine.sharing.observe(machine.now + 0.001, machine.waited + 0.001), "shorter than a window"


def test_the_thread_is_bound_or_not() -> None:
    cores = sorted(os.sched_getaffinity(0))
    clock = iter([0.0, 0.1, 0.2, 0.3, 0.6])
    waited = iter([1.0, 1.09, 1.18, 1.18, 1.18])
    thread_id = threading.get_native_id()
    binding = CoreBinding(thread_id, cores[0], cores, lambda: next(waited), lambda: next(clock))
    os.sched_setaffinity(thread_id, [cores[0]])
    try:
        found = []
        for _ in range(5):
            binding.follow()
            found.append(sorted(os.sched_getaffinity(thread_id)))
    finally:
        os.sched_setaffinity(thread_id, cores)
    assert found == [[cores[0]], cores, cores, cores, [cores[0]]]


def test_linux_counts_the_waiting() -> None:
    assert waited_seconds(threading.get_native_id()) >= 0
    assert waited_seconds(2**22 + 1) == 0.0
