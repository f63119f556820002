"""When a rank says that it shares its cores, and when its only thread leaves its core and comes back. The clock and the waiting
are the test's."""

from __future__ import annotations

import logging
import os
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from inflight.config.engine import EngineConfig
from inflight.config.ranks import places_on
from inflight.device.cpu import CpuDevice
from inflight.worker.core_binding import CALM_SECONDS, CoreBinding
from inflight.worker.core_sharing import (
    LOG_CALM_SECONDS,
    LOG_WINDOW_SECONDS,
    WINDOW_SECONDS,
    CoreSharing,
    CoreWatch,
    LeaderPlace,
)
from inflight.worker.startup import start_threads

STEP = 0.01  # seconds between two observations


class Machine:
    """One or two threads, looked at after every step. In a step the first one waits for `share` of it, the other never."""

    def __init__(self, *, num_threads: int = 1) -> None:
        self.now, self.waited, self.num_reads = 100.0, 7.0, 0
        clock = lambda: self.now  # noqa: E731
        self.sharing = CoreSharing(lambda: self.read(1), clock, window=WINDOW_SECONDS, calm=CALM_SECONDS)
        self.watch = CoreWatch([1, 2][:num_threads], None, self.read, clock)

    def read(self, thread_id: int) -> float:
        self.num_reads += 1
        return self.waited if thread_id == 1 else 3.0

    def run(self, seconds: float, *, share: float) -> list[bool]:
        """Whether the binding's rule says after each step that there is company."""
        states = []
        for _ in range(round(seconds / STEP)):
            self._compute(share)
            self.sharing.has_changed()
            states.append(self.sharing.is_shared)
        return states

    def told(self, seconds: float, *, share: float) -> list[bool]:
        """What the rank says after each step."""
        states = []
        for _ in range(round(seconds / STEP)):
            self._compute(share)
            self.watch.update()
            states.append(self.watch.shares_cores)
        return states

    def _compute(self, share: float) -> None:
        self.now += STEP
        self.waited += share * STEP


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
    assert machine.sharing.has_changed() and not machine.sharing.is_shared
    machine.now, machine.waited = machine.now + 0.001, machine.waited + 0.001
    assert not machine.sharing.has_changed(), "shorter than a window"


def test_the_rank_tells_each_change_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine(num_threads=2)
    assert not any(machine.told(5.0, share=0.15)), "of two threads it is the mean that counts"
    states = machine.told(2 * LOG_WINDOW_SECONDS, share=0.5)
    assert not states[0] and states[-1]
    assert "had to wait for their cores for 25 % of the time" in caplog.messages[-1]
    for _ in range(10):  # a browser that opens a page now and then
        assert all(machine.told(LOG_CALM_SECONDS / 2, share=0.0) + machine.told(1.0, share=0.5))
    assert len(caplog.messages) == 1, caplog.messages
    assert not machine.told(LOG_CALM_SECONDS + 2 * LOG_WINDOW_SECONDS, share=0.0)[-1]
    assert len(caplog.messages) == 2 and "for themselves again" in caplog.messages[-1]
    assert not any(machine.told(5.0, share=0.1)) and len(caplog.messages) == 2


def test_a_look_after_most_steps_costs_only_a_clock() -> None:
    machine = Machine(num_threads=2)
    machine.num_reads = 0
    machine.told(10.0, share=0.0)
    assert machine.num_reads <= 2 * 10.0 / LOG_WINDOW_SECONDS


def test_all_compute_threads_are_watched() -> None:
    device, before = CpuDevice(), set(os.listdir("/proc/self/task"))
    options = SimpleNamespace(kind="cpu", num_threads=2, threads_bind="off")
    try:
        watch = start_threads(cast("EngineConfig", SimpleNamespace(device=options)), places_on([0])[0], device)
        assert watch is not None and len(watch.thread_ids) == 2
        assert set(map(str, watch.thread_ids)) <= set(os.listdir("/proc/self/task")) - before
        assert device.submit(threading.get_native_id).result() in watch.thread_ids
    finally:
        device.close()


def test_the_thread_is_bound_or_not() -> None:
    cores = sorted(os.sched_getaffinity(0))
    clock = iter([0.0, 0.1, 0.2, 0.3, 0.6])
    waited = iter([1.0, 1.09, 1.18, 1.18, 1.18])
    thread_id = threading.get_native_id()
    binding = CoreBinding(thread_id, cores[0], cores, lambda thread_id: next(waited), lambda: next(clock))
    os.sched_setaffinity(thread_id, [cores[0]])
    try:
        found = []
        for _ in range(4):
            binding.update()
            found.append(sorted(os.sched_getaffinity(thread_id)))
    finally:
        os.sched_setaffinity(thread_id, cores)
    assert found == [cores, cores, cores, [cores[0]]]


def test_the_leader_comes_back_to_its_core_when_this_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 1 is the leader's, core 2 that of another thread. (share of core 1's time that is idle, where the leader runs)"""
    moves: list[tuple[int, list[int]]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda thread_id, cores: moves.append((thread_id, list(cores))))
    now, idle, core = 100.0, 50.0, 1
    place = LeaderPlace(7, 1, [1, 2], lambda thread_id: core, lambda core: idle, lambda: now)

    def has_moved(idle_share: float, runs_on: int, seconds: float = 2 * WINDOW_SECONDS) -> bool:
        nonlocal now, idle, core
        moves.clear()
        now, idle, core = now + seconds, idle + idle_share * seconds, runs_on
        place.update()
        assert moves in ([], [(7, [1]), (7, [1, 2])])
        return bool(moves)

    assert not has_moved(0.9, runs_on=1), "it is where it belongs"
    assert not has_moved(0.9, runs_on=2), (
        "the first measurement finds it away, and does not know how idle its core was meanwhile"
    )
    assert not has_moved(0.1, runs_on=2), "another program has its core"
    assert not has_moved(0.9, runs_on=2, seconds=WINDOW_SECONDS / 2), "too early for a measurement"
    assert has_moved(0.9, runs_on=2)
    assert not has_moved(0.9, runs_on=1)
