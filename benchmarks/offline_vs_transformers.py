"""Inflight beside transformers on the same machine at the same time: throughput, start-up and memory.

    python -m benchmarks.offline_vs_transformers [--model qwen3-0.6b] [--rounds 3] [--models FOLDER]

Each engine is loaded in a process of its own. They take turns workload by workload, the order changing from round to round, and
the one that is not asked sleeps: a machine that gets slower slows both. Figures are medians, in tokens per second.

Then fresh processes measure construction to first token with the model's files in the page cache (goal: under 3 s). The peak
memory is VmHWM of the Inflight process after all workloads; its goal is weights + KV cache + 1 GB.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.engine_process import ENGINES, EngineProcess
from benchmarks.models import add_model_arguments, model_folder, read_into_page_cache, weight_bytes
from benchmarks.report import allow_slow_steps, emit, print_table, verdict
from inflight.entrypoints.cli.engine_options import parse_bytes
from inflight.entrypoints.cli.workloads import STANDARD, Workload, select

STARTUP_GOAL_S = 3.0
ALLOWANCE_BYTES = 10**9

Times = dict[tuple[str, str], list[float]]  # (engine, workload) -> seconds


def measure_throughput(folder: Path, workloads: list[Workload], rounds: int, kv_bytes: int) -> tuple[Times, int]:
    """Seconds of every run, and the peak memory of the Inflight process."""
    times: Times = defaultdict(list)
    with EngineProcess("inflight", folder, kv_bytes) as ours, EngineProcess("transformers", folder, kv_bytes) as theirs:
        for index in range(rounds):
            for workload in workloads:
                for process in (ours, theirs) if index % 2 == 0 else (theirs, ours):
                    seconds = process.run(workload)
                    times[process.engine, workload.name].append(seconds)
                    emit(
                        benchmark="offline", round=index, engine=process.engine, workload=workload.name,
                        seconds=round(seconds, 3), tokens_per_s=round(workload.num_counted_tokens / seconds, 1),
                    )  # fmt: skip
        return times, ours.peak_bytes()


def measure_startup(folder: Path, rounds: int, kv_bytes: int) -> dict[str, list[dict[str, float]]]:
    """What fresh processes report, per engine."""
    read_into_page_cache(folder)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for index in range(rounds):
        for engine in ENGINES:
            with EngineProcess(engine, folder, kv_bytes) as process:
                found[engine].append(process.startup)
                rounded = {name: round(seconds, 2) for name, seconds in process.startup.items()}
                emit(benchmark="startup", round=index, engine=engine, **rounded)
    return found


def print_throughput(workloads: list[Workload], times: Times) -> None:
    rows = []
    for workload in workloads:
        medians = [statistics.median(times[engine, workload.name]) for engine in ENGINES]
        ours, theirs = (workload.num_counted_tokens / seconds for seconds in medians)
        rows.append([workload.name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"])
        emit(
            benchmark="offline", workload=workload.name, inflight=round(ours, 1), transformers=round(theirs, 1),
            ratio=round(ours / theirs, 2),
        )  # fmt: skip
    print_table(["tokens/s", *ENGINES, "ratio"], rows)


def print_startup(found: dict[str, list[dict[str, float]]]) -> None:
    rows = []
    for engine, reports in found.items():
        medians = {name: statistics.median(report[name] for report in reports) for name in reports[0]}
        seconds = medians["first_token_s"]
        goal = verdict(seconds < STARTUP_GOAL_S) if engine == "inflight" else ""
        cells = [f"{medians[name]:.2f}" for name in ("import_s", "construct_s", "first_token_s")]
        rows.append([engine, *cells, f"{medians['import_s'] + seconds:.2f}", goal])
        emit(benchmark="startup", engine=engine, **{name: round(value, 2) for name, value in medians.items()})
    print_table(
        ["startup", "imports s", "constructor s", "to first token s", "with imports s", f"< {STARTUP_GOAL_S:g} s"], rows
    )


def print_memory(folder: Path, peak: int, kv_bytes: int) -> None:
    allowed = weight_bytes(folder) + kv_bytes + ALLOWANCE_BYTES
    sizes = {"peak_bytes": peak, "weight_bytes": weight_bytes(folder), "kv_bytes": kv_bytes, "allowed_bytes": allowed}
    emit(benchmark="memory", **sizes)
    cells = [f"{size / 1e9:.2f}" for size in sizes.values()]
    print_table(
        ["memory", "peak GB", "weights GB", "KV GB", "allowed GB", ""],
        [["inflight", *cells, verdict(peak <= allowed)]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Inflight and transformers, alternating.")
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--workloads", default=",".join(each.name for each in STANDARD), help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; medians count [%(default)s]")
    parser.add_argument("--kv-cache-memory-bytes", type=parse_bytes, default=parse_bytes("2G"), help="[2G]")
    parser.add_argument("--skip-startup", action="store_true", help="leave out the fresh processes")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    try:
        workloads = select(args.workloads)
    except ValueError as error:
        parser.error(str(error))
    allow_slow_steps()
    folder = model_folder(args.model, args.models)
    times, peak = measure_throughput(folder, workloads, args.rounds, args.kv_cache_memory_bytes)
    startup = {} if args.skip_startup else measure_startup(folder, args.rounds, args.kv_cache_memory_bytes)
    print_throughput(workloads, times)
    if startup:
        print_startup(startup)
    print_memory(folder, peak, args.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
