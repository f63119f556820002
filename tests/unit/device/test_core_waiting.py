"""Linux counts the waiting, and two threads on one core wait for each other."""

from __future__ import annotations

import os
import threading

from inflight.device.core_glance import share_of_waiting
from inflight.device.core_waiting import core_of, idle_seconds, waited_seconds


def test_linux_counts_the_waiting() -> None:
    assert waited_seconds(threading.get_native_id()) >= 0
    assert waited_seconds(2**22 + 1) == 0.0


def test_two_threads_on_one_core_wait_for_each_other() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])
    try:
        share = share_of_waiting(2, 0.03)
    finally:
        os.sched_setaffinity(0, cores)
    assert share is None or 0.3 < share <= 1.0, "0.5, and more if other programs use the core"


def test_where_a_thread_runs_and_how_long_its_core_has_been_idle() -> None:
    core = core_of(threading.get_native_id())
    assert core in os.sched_getaffinity(0)
    before = idle_seconds(core)
    assert 0 <= before <= idle_seconds(core)
    assert idle_seconds(10**6) == 0.0
