"""The device's kernels in some steps, from torch.profiler: how long it stood idle, where, and which kernels took the time.

A gap is a time between two kernels in which none runs. Kernels that follow one another within a graph leave a small one; what
is larger than most is where the device waited for a launch. The gap between steps is that which comes once a step, at one and
the same place, and is the largest of these.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.shared.report import percentile

NAME_CHARACTERS = 60
SYNCHRONIZATIONS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Kernel:
    """Microseconds; `start` is on the trace's clock."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Trace:
    """`kernels` by their starts; `host_calls` counts calls of the CUDA runtime that make the host wait."""

    kernels: list[Kernel]
    host_calls: dict[str, int]


def record(device: str, run: Callable[[], None]) -> Trace:
    """What the device did while `run` ran; on a CPU, torch's operators stand for kernels. All threads of the process count."""
    if device == "cuda":
        profiler = profile(activities=[ProfilerActivity.CUDA])
    else:
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        profiler = profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads)
    profiler.start()
    try:
        run()
    finally:
        profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]  # Any: JSON
    return read_events(events, "kernel" if device == "cuda" else "cpu_op")


def read_events(events: Sequence[dict[str, Any]], category: str) -> Trace:
    """Events of Chrome's trace format. Annotations lie over kernels and are none: they have a category of their own."""
    kernels = [
        Kernel(event["name"], float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") == category
    ]
    runtime = Counter(event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    calls = {name: runtime[name] for name in SYNCHRONIZATIONS if runtime[name]}
    return Trace(sorted(kernels, key=lambda kernel: kernel.start), calls)


@dataclass(frozen=True)
class Gap:
    """Between the kernels `before` and `after`, in microseconds."""

    before: str
    after: str
    duration: float


def gaps_of(kernels: Sequence[Kernel]) -> list[Gap]:
    """In order. `kernels` are sorted by start and may overlap."""
    found, last = [], kernels[0]
    for kernel in kernels[1:]:
        end = last.start + last.duration
        if kernel.start > end:
            found.append(Gap(last.name, kernel.name, kernel.start - end))
        if kernel.start + kernel.duration > end:
            last = kernel
    return found


@dataclass(frozen=True, kw_only=True)
class Idleness:
    """Of the time from the first kernel to the end of the last one.

    `waiting_share` is the part of the gaps that is longer than the median gap: what late launches cost. The gap between steps
    is None where no pair of kernels meets about once a step.
    """

    us_per_step: float
    idle_share: float
    waiting_share: float
    num_gaps_per_step: float
    median_gap_us: float
    step_gap_p50_us: float | None
    step_gap_p99_us: float | None
    step_gap_at: str


def idleness(kernels: Sequence[Kernel], num_steps: int) -> Idleness:
    """
    Raises:
        ValueError: there are no kernels.
    """
    if not kernels:
        raise ValueError("the trace holds no kernels: the profiler has not seen the device")
    gaps = gaps_of(kernels)
    wall = max(kernel.start + kernel.duration for kernel in kernels) - kernels[0].start
    median = statistics.median(gap.duration for gap in gaps) if gaps else 0.0
    places: dict[tuple[str, str], list[float]] = defaultdict(list)
    for gap in gaps:
        places[gap.before, gap.after].append(gap.duration)
    of_steps = {
        place: durations for place, durations in places.items() if 0.8 * num_steps <= len(durations) <= 1.2 * num_steps
    }
    place = max(of_steps, key=lambda place: percentile(of_steps[place], 0.5)) if of_steps else None
    return Idleness(
        us_per_step=wall / num_steps,
        idle_share=sum(gap.duration for gap in gaps) / wall,
        waiting_share=sum(max(0.0, gap.duration - median) for gap in gaps) / wall,
        num_gaps_per_step=len(gaps) / num_steps,
        median_gap_us=median,
        step_gap_p50_us=percentile(of_steps[place], 0.5) if place else None,
        step_gap_p99_us=percentile(of_steps[place], 0.99) if place else None,
        step_gap_at=" -> ".join(name[:NAME_CHARACTERS] for name in place) if place else "",
    )


@dataclass(frozen=True)
class KernelShare:
    name: str
    count_per_step: float
    us_per_step: float
    share: float  # of the time of all kernels


def kernel_shares(kernels: Sequence[Kernel], num_steps: int) -> list[KernelShare]:
    """Longest first."""
    durations: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        durations[kernel.name].append(kernel.duration)
    total = sum(map(sum, durations.values()))
    return [
        KernelShare(name[:NAME_CHARACTERS], len(each) / num_steps, sum(each) / num_steps, sum(each) / total)
        for name, each in sorted(durations.items(), key=lambda entry: -sum(entry[1]))
    ]
