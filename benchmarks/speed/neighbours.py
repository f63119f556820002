"""Inflight on a quiet machine and beside busy programs, in turns: what share of its speed is left.

    python -m benchmarks.neighbours [--model qwen3-0.6b] [--formats bf16,int8] [--neighbours none,one,two,periodic] [--rounds 3]
                                    [--workloads standard] [--output-len N] [--same-session] [--peers openvino,llamacpp]
                                    [--before CHECKOUT] [--quota CORES]

Engines and workloads are those of `benchmarks.compare`. In every round each workload runs on every engine beside each kind of
neighbours: none, one or two processes that compute all the time, and one that computes for 300 ms and sleeps for 300 ms, in
turns. They have our priority, and a session of their own, as other programs have. Where Linux groups threads by session
(`/proc/sys/kernel/sched_autogroup_enabled`), one busy process may take as much as all of our threads together: of two cores,
one leaves us a half, and two leave us a third. With --same-session a neighbour gets as much as one of our threads: a fair share
of two threads is then 0.67 to 0.75 beside one, and 0.5 beside two.

With --quota 1.5 there is one more kind, "quota": no neighbours, but the engine may use only 1.5 cores, as in a container of
`docker run --cpus 1.5`. Engines start under this quota, and for the other kinds it is lifted. The kernel stops an engine that
has used its quota until the period of 100 ms ends: "throttled" counts these periods. Needs root.

A share is the speed beside neighbours / the quiet speed of the same round; beside the periodic one, the speed is divided by the
mean of the speeds without a neighbour and with one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

from benchmarks.compare.__main__ import Comparison, Speeds, make_parser
from benchmarks.compare.engines import Engine
from benchmarks.compare.process import EngineProcess
from benchmarks.compare.table import Spread, markdown
from benchmarks.shared.report import allow_slow_steps, emit
from benchmarks.speed.cpu_quota import CpuGroup
from inflight.entrypoints.cli.workloads import Workload, select

BUSY = "while True: pass"
PERIODIC = """
import time
while True:
    end = time.monotonic() + 0.3
    while time.monotonic() < end: pass
    time.sleep(0.3)
"""
NEIGHBOURS = {"none": [], "one": [BUSY], "two": [BUSY, BUSY], "periodic": [PERIODIC]}
QUOTA = "quota"  # the kind without neighbours, but with a limit
SETTLE_SECONDS = 0.5  # so long a neighbour computes before anything is measured


@contextmanager
def neighbours(programs: Sequence[str], *, same_session: bool) -> Iterator[None]:
    processes = [
        subprocess.Popen([sys.executable, "-c", program], start_new_session=not same_session) for program in programs
    ]
    try:
        if processes:
            time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class BesideNeighbours(Comparison):
    """`measure` returns speeds by (the engine's label and the kind of neighbours, workload)."""

    kinds: Sequence[str] = tuple(NEIGHBOURS)
    group: CpuGroup | None = None  # of all engines, if there is a quota

    def _start(self, engine: Engine) -> EngineProcess:
        if self.group is not None:
            self.group.limit(self._args.quota)
        with self.group.joined() if self.group is not None else nullcontext():
            process = super()._start(engine)
        if self.group is not None:
            self.group.limit(None)
        return process

    def _run(self, process: EngineProcess, workload: Workload, kind: str, index: int) -> float:
        """Tokens per second."""
        line = {"round": index, "engine": process.engine.label, "neighbours": kind, "workload": workload.name}
        if self.group is None or kind != QUOTA:
            speed = process.run(workload)
        else:
            self.group.limit(self._args.quota)
            before = self.group.throttling()
            speed = process.run(workload)
            periods, stops = (now - then for now, then in zip(self.group.throttling(), before, strict=True))
            self.group.limit(None)
            line |= {"periods": periods, "throttled": stops}
        emit(benchmark="neighbours", **line, tokens_per_s=round(speed, 2))
        return speed

    def _session(self, engines: list[Engine]) -> Speeds:
        speeds: Speeds = defaultdict(list)
        with ExitStack() as stack:
            processes = [stack.enter_context(self._start(engine)) for engine in engines]
            for index in range(-self._args.warm_up, self._args.rounds):
                for workload in self._workloads:
                    for kind in self.kinds if index % 2 == 0 else self.kinds[::-1]:
                        with neighbours(NEIGHBOURS.get(kind, []), same_session=self._args.same_session):
                            for process in processes if index % 2 == 0 else processes[::-1]:
                                speed = self._run(process, workload, kind, index)
                                if index >= 0:
                                    speeds[f"{process.engine.label}, {kind}", workload.name].append(speed)
        return speeds


def table_rows(label: str, kinds: Sequence[str], workloads: Sequence[Workload], speeds: Speeds) -> list[list[str]]:
    """The header, and for each kind of neighbours the medians of the speeds and of the shares. The table of our engine also has
    the medians of (our speed / the speed of the fastest other engine)."""
    rows = [[label, *(workload.name for workload in workloads)]]
    labels = dict.fromkeys(name.rpartition(", ")[0] for name, _ in speeds)
    others = [other for other in labels if other != label] if label == next(iter(labels)) else []
    for kind in kinds:
        found = {workload.name: speeds[f"{label}, {kind}", workload.name] for workload in workloads}
        rows.append([f"{kind}: tokens/s", *(f"{statistics.median(each):.1f}" for each in found.values())])
        if others:
            ratios = []
            for name, each in found.items():
                best = [max(turn) for turn in zip(*(speeds[f"{other}, {kind}", name] for other in others), strict=True)]
                ratios.append(str(Spread.of([a / b for a, b in zip(each, best, strict=True)])))
            rows.append([f"{kind}: times the best other", *ratios])
        if kind == "none" or "none" not in kinds:
            continue
        shares = []
        for name, each in found.items():
            quiet = speeds[f"{label}, none", name]
            if kind == "periodic" and "one" in kinds:
                quiet = [(a + b) / 2 for a, b in zip(quiet, speeds[f"{label}, one", name], strict=True)]
            shares.append(str(Spread.of([a / b for a, b in zip(each, quiet, strict=True)])))
        rows.append([f"{kind}: share", *shares])
    return rows


def main() -> None:
    parser = make_parser()
    parser.description = __doc__
    parser.set_defaults(formats=["bf16", "int8"], peers=[], rounds=3)
    parser.add_argument("--neighbours", default=",".join(NEIGHBOURS), help="kinds of neighbours [%(default)s]")
    parser.add_argument("--same-session", action="store_true", help="neighbours are of our session")
    parser.add_argument("--quota", type=float, metavar="CORES", help="measure under a quota of processor time, too")
    parser.add_argument("--output-len", type=int, help="at most so many tokens of each request")
    args = parser.parse_args()
    kinds = [kind for kind in args.neighbours.split(",") if kind]
    if not kinds or not set(kinds) <= set(NEIGHBOURS):
        parser.error(f"--neighbours names {', '.join(NEIGHBOURS)}, not {args.neighbours!r}")
    workloads = select(args.workloads.replace("standard", "all"))
    if args.output_len is not None:
        workloads = [replace(each, output_len=min(each.output_len, args.output_len)) for each in workloads]
    allow_slow_steps()
    comparison = BesideNeighbours(args, workloads)
    comparison.kinds = kinds if args.quota is None else [*kinds, QUOTA]
    report: dict[str, Mapping[str, list[float]]] = {}
    with CpuGroup() if args.quota is not None else nullcontext() as comparison.group:
        for our_format in args.formats:
            for speeds in comparison.measure(our_format):
                for label in dict.fromkeys(name.rpartition(", ")[0] for name, _ in speeds):
                    print(f"\n{comparison.folder.name}, {args.rounds} rounds; shares: median (smallest-largest)\n")
                    print(markdown(table_rows(label, comparison.kinds, workloads, speeds)))
                report[our_format] = {" ".join(key): each for key, each in speeds.items()}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
