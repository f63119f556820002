from __future__ import annotations

import subprocess
import sys


def test_a_benchmark_runs_with_a_fast_clock() -> None:
    """In a process of its own, because the clock is replaced."""
    script = """
import time
from benchmarks.robustness import fast_clock
real = time.monotonic
start = real()
fast_clock.install(1000.0)
first = time.monotonic()
time.sleep(0.01)
passed = time.monotonic() - first
print(passed >= 10, passed <= 1000 * (real() - start), time.time_ns() > 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
