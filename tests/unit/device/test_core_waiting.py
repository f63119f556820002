"""Linux counts the waiting, and two threads on one core wait for each other."""

from __future__ import annotations

import os
import threading

import pytest

from inflight.device import core_glance, core_waiting
from inflight.device.core_glance import share_of_waiting
from inflight.device.core_waiting import core_of, idle_seconds, waited_seconds
from tests.support.waits import wait_until


def test_linux_counts_the_waiting() -> None:
    assert waited_seconds(threading.get_native_id()) >= 0
    assert waited_seconds(2**22 + 1) == 0.0


def test_two_threads_on_one_core_wait_for_each_other() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])
    try:
        # 0.5, and more if other programs use the core; less if they kept one of the threads from beginning in time
        wait_until(lambda: (share := share_of_waiting(2, 0.03)) is None or 0.3 < share <= 1.0)
    finally:
        os.sched_setaffinity(0, cores)


def test_where_a_thread_runs_and_how_long_its_core_has_been_idle() -> None:
    core = core_of(threading.get_native_id())
    assert core in os.sched_getaffinity(0)
    before = idle_seconds(core)
    assert 0 <= before <= idle_seconds(core)
    assert idle_seconds(10**6) == 0.0


def show(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """What Linux would tell in these files."""

    class Shown:
        def __init__(self, name: str) -> None:
            self.name = name

        def exists(self) -> bool:
            return self.name in files

        def read_text(self) -> str:
            if self.name not in files:
                raise FileNotFoundError(self.name)
            return files[self.name]

    monkeypatch.setattr(core_waiting, "Path", Shown)
    monkeypatch.setattr(core_glance, "Path", Shown)


def test_what_linux_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = " ".join(str(number) for number in range(4, 53))  # the fields from the fourth on
    show(
        monkeypatch,
        {
            "/proc/self/task/7/schedstat": "5000000000 2500000000 9\n",
            "/proc/self/task/8/schedstat": "0\n",
            "/proc/self/task/7/stat": f"7 (a name) 9) S {numbers}\n",
            "/proc/stat": "cpu 9 9 9 9 9\ncpu1 1 2 3 500 6\ncpu10 1 2 3 700 6\nintr 3\n",
        },
    )
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    assert (waited_seconds(7), waited_seconds(8), waited_seconds(9)) == (2.5, 0.0, 0.0)
    assert core_of(7) == 39  # the 39th field of proc(5) is the processor
    assert (idle_seconds(1), idle_seconds(10), idle_seconds(0)) == (5.0, 7.0, 0.0)


def test_a_kernel_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, {})
    assert share_of_waiting(2, 60.0) is None
