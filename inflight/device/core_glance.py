"""`share_of_waiting`: computes for a moment, to see whether other programs use the cores."""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inflight.device.core_waiting import waited_seconds


def share_of_waiting(num_threads: int, seconds: float) -> float | None:
    """Computes with `num_threads` threads for `seconds`. Returns for which share of this time the threads waited for a core;
    None if the kernel does not count it."""
    if not Path("/proc/self/schedstat").exists():
        return None

    def compute(end: float) -> float:
        while time.monotonic() < end:
            hashlib.sha256(block)  # releases the interpreter lock
        return waited_seconds(threading.get_native_id()) / (time.monotonic() - start)

    block = bytes(1 << 18)
    start = time.monotonic()
    with ThreadPoolExecutor(num_threads) as threads:
        return statistics.fmean(threads.map(compute, [start + seconds] * num_threads))
