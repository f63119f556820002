"""Runs another benchmark with a fast clock, so that hours pass for all code that reads the time: ages, pauses, rates.

    python -m benchmarks.fast_clock 64 benchmarks.soak --requests 30000

The first argument is a factor: the clocks of the module `time` run so many times as fast, in this process only. Waits are not
shorter: a wait of one second takes one real second, in which 64 seconds pass on the clock of this example.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from collections.abc import Callable

_CLOCKS = ("time", "monotonic", "perf_counter")


def install(factor: float) -> None:
    """From now on the clocks of the module `time` run `factor` times as fast. Call this before anything keeps one of them."""
    for name in _CLOCKS:
        setattr(time, name, _fast(getattr(time, name), factor))
        in_ns = f"{name}_ns"
        exact = _fast(getattr(time, in_ns), factor)
        setattr(time, in_ns, lambda exact=exact: int(exact()))


def _fast(clock: Callable[[], float], factor: float) -> Callable[[], float]:
    start = clock()
    return lambda: start + factor * (clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="Another benchmark, with a fast clock.")
    parser.add_argument("factor", type=float, help="how many times as fast the clock runs; at least 1")
    parser.add_argument("module", help="the other benchmark, such as benchmarks.soak")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its options")
    args = parser.parse_args()
    if not args.factor >= 1:
        parser.error(f"factor is {args.factor:g}, but must be at least 1")
    install(args.factor)
    sys.argv[:] = [args.module, *args.options]
    runpy.run_module(args.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
