"""Whether pipeline stages work at the same time: the time between steps beside that of the slowest stage, and a picture of it.

    python -m benchmarks.pipeline_overlap fixed [--layouts pp2 pp4 ...] [--steps 120] [--trace FILE.json] [--png FILE]
    python -m benchmarks.pipeline_overlap real [--model FOLDER] [--backend mp] [--stagger 3] [--depth 4] ...

"fixed": stages of 20 ms and links of 10 ms, or of 0 ms ("fast"), see `fixed_stages.py`. The goal is that a step takes
at most 1.15 times the slowest stage. Stagger and depth are given; or the engine measures and chooses them ("measured"); or the
stagger is the number of stages ("stages", the default before the engine measured).

"real": a real model, PP 2; its stages share the machine's cores with each other and with the engine. The trace is for
chrome://tracing and Perfetto.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.overlap.fixed_stages import STAGE_SECONDS, Layout, decode_request, make_engine, rank_events
from benchmarks.overlap.step_picture import draw_steps
from benchmarks.shared.models import DEFAULT_MODELS_FOLDER, model_folder
from benchmarks.shared.report import allow_slow_steps, emit, percentile, print_table, verdict
from inflight.config.engine import SchedulerConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.core.chrome_trace import chrome_trace
from inflight.engine.core.engine_core import EngineCore
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.executor.executor import Executor
from inflight.sampling_params import SamplingParams
from inflight.timeline import Event

GOAL_RATIO = 1.15
NUM_REQUESTS = 24
WARM_UP_STEPS = 30
PICTURE_STEPS = 8
WINDOW_STEPS = 12  # a multiple of every stagger: a pattern that repeats with it weighs the same in all windows

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="pp2", num_stages=2, stagger=3, depth=4),
        Layout(name="pp4", num_stages=4, stagger=6, depth=7),
        Layout(name="pp2-mp", num_stages=2, stagger=3, depth=4, backend="mp"),
        Layout(name="pp4-mp", num_stages=4, stagger=6, depth=7, backend="mp"),
        Layout(name="pp2-measured", num_stages=2, stagger=None),
        Layout(name="pp4-measured", num_stages=4, stagger=None),
        Layout(name="pp2-mp-measured", num_stages=2, stagger=None, backend="mp"),
        Layout(name="pp4-mp-measured", num_stages=4, stagger=None, backend="mp"),
        Layout(name="pp2-fast-measured", num_stages=2, stagger=None, fast_links=True),
        Layout(name="pp4-fast-measured", num_stages=4, stagger=None, fast_links=True),
        Layout(name="pp2-fast-mp-measured", num_stages=2, stagger=None, fast_links=True, backend="mp"),
        Layout(name="pp2-stages", num_stages=2, stagger=2, depth=3),
        Layout(name="pp4-stages", num_stages=4, stagger=4, depth=5),
        Layout(name="pp2-fast-stages", num_stages=2, stagger=2, depth=3, fast_links=True),
        Layout(name="pp4-fast-stages", num_stages=4, stagger=4, depth=5, fast_links=True),
        Layout(name="pp2-blocking", num_stages=2, stagger=1, depth=1),
        Layout(name="pp4-blocking", num_stages=4, stagger=1, depth=1),
    )
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Steps in a row in which every request decodes. Times are milliseconds."""

    periods: list[float]  # from one commit to the next
    slowest_stage: float  # mean time of `forward` and `sample` on that stage
    events: dict[str, list[Event]]  # of these steps, by process
    scheduler: SchedulerConfig

    @property
    def steady(self) -> float:
        """The median over windows of the mean period in a window: it sees a bubble in every third step, which the median of
        the periods would not, and passes over moments in which the machine was busy with something else."""
        starts = range(max(1, len(self.periods) - WINDOW_STEPS + 1))
        windows = [self.periods[start : start + WINDOW_STEPS] for start in starts]
        return statistics.median(statistics.fmean(window) for window in windows)


def measure(core: EngineCore, executor: Executor, step: Callable[[], object], num_steps: int) -> Measured:
    """The requests have been added, and `step` steps; none of them ends meanwhile."""
    for _ in range(WARM_UP_STEPS):
        step()
    num_running = core.scheduler.num_running
    for _ in range(num_steps + 1):
        step()
    assert core.scheduler.num_running == num_running and not core.scheduler.num_waiting, "this is no steady state"
    commits = [event for event in core.timeline.events() if event.phase == "commit"][-num_steps - 1 :]
    periods = [(after.end_ns - before.end_ns) / 1e6 for before, after in itertools.pairwise(commits)]
    steps = range(commits[1].step_id, commits[-1].step_id + 1)
    events = {"engine": core.timeline.events(), **rank_events(executor)}
    events = {process: [event for event in found if event.step_id in steps] for process, found in events.items()}
    slowest = max(busy_milliseconds(found, num_steps) for process, found in events.items() if process != "engine")
    return Measured(periods=periods, slowest_stage=slowest, events=events, scheduler=core.scheduler_config)


def busy_milliseconds(events: list[Event], num_steps: int) -> float:
    """What a stage's compute thread works for a step, the waiting left out."""
    return sum(event.microseconds for event in events if event.phase in ("forward", "sample")) / 1e3 / num_steps


def measure_fixed(layout: Layout, num_steps: int) -> Measured:
    core, executor = make_engine(layout, NUM_REQUESTS)
    try:
        for index in range(NUM_REQUESTS):
            core.add_request(*decode_request(index, max_tokens=900))
        return measure(core, executor, core.step, num_steps)
    finally:
        core.close()


def measure_real(args: argparse.Namespace) -> Measured:
    engine = LLMEngine.from_args(
        EngineArgs(
            model=None if args.model is None else str(model_folder(args.model, args.models)),
            pipeline_parallel_size=2,
            pipeline_stagger=args.stagger,
            pipeline_depth=args.depth,
            distributed_executor_backend=args.backend,
            max_num_seqs=args.requests,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 29,
            num_threads=1,
            skip_tokenizer_init=True,
        )
    )
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    try:
        for index in range(args.requests):
            prompt = [rng.randrange(3, 1000) for _ in range(16)]
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        return measure(engine.core, engine.executor, engine.step, args.steps)
    finally:
        engine.close()


def row_of(name: str, layout: str, measured: Measured, goal: float | None) -> list[object]:
    """A line of the table; it is emitted, too."""
    p50, p95 = percentile(measured.periods, 0.5), percentile(measured.periods, 0.95)
    ratio = measured.steady / (STAGE_SECONDS * 1e3 if name == "fixed" else measured.slowest_stage)
    mean = statistics.fmean(measured.periods)
    figures = {
        "steady_ms": measured.steady,
        "mean_ms": mean,
        "p50_ms": p50,
        "p95_ms": p95,
        "stage_ms": measured.slowest_stage,
    }
    rounded = {key: round(value, 2) for key, value in figures.items()}
    emit(
        benchmark=f"pipeline_overlap {name}",
        layout=layout,
        steps=len(measured.periods),
        ratio=round(ratio, 3),
        **rounded,
    )
    met = "" if goal is None else f"<= {goal} {verdict(ratio <= goal)}"
    return [layout, len(measured.periods), *rounded.values(), f"{ratio:.3f}", met]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The time of a pipeline's steps beside that of its slowest stage.")
    parser.add_argument("stages", choices=("fixed", "real"), help="stages of a fixed time, or a real model's")
    parser.add_argument("--steps", type=int, default=120, help="steps timed [%(default)s]")
    parser.add_argument("--trace", type=Path, help="write the Chrome trace of the first layout")
    parser.add_argument("--png", type=Path, help=f"write a picture of {PICTURE_STEPS} steps (needs matplotlib)")
    fixed = parser.add_argument_group("fixed")
    fixed.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="[all]")
    real = parser.add_argument_group("real")
    real.add_argument("--model", help="a shape of benchmarks.models or a model folder [the embedded model]")
    real.add_argument("--models", type=Path, default=DEFAULT_MODELS_FOLDER, help="where models of a shape are kept")
    real.add_argument("--requests", type=int, default=NUM_REQUESTS, help="[%(default)s]")
    real.add_argument("--backend", choices=("uni", "mp"), default="mp", help="threads or processes [%(default)s]")
    real.add_argument("--stagger", type=int, help="[the engine's choice]")
    real.add_argument("--depth", type=int, help="[the engine's choice]")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if not 20 <= args.steps <= 800:  # as many fit the ring, the requests' tokens and the model's length
        parser.error("--steps must be from 20 to 800")
    allow_slow_steps()
    measured: dict[str, Measured] = {}
    rows: list[list[object]] = []
    if args.stages == "fixed":
        for name in args.layouts:
            layout = LAYOUTS[name]
            measured[name] = measure_fixed(layout, args.steps)
            has_goal = layout.stagger is None or layout.depth > layout.stagger > layout.num_stages
            chosen = measured[name].scheduler
            title = f"{name} (stagger {chosen.stagger}, depth {chosen.depth})"
            rows.append(row_of("fixed", title, measured[name], GOAL_RATIO if has_goal else None))
    else:
        name = f"pp2 {args.backend}, {args.requests} requests"
        measured[name] = measure_real(args)
        rows.append(row_of("real", name, measured[name], None))
    print_table(["layout", "steps", "steady ms", "mean ms", "p50 ms", "p95 ms", "stage ms", "ratio", "goal"], rows)
    if args.trace is not None:
        args.trace.write_text(json.dumps(chrome_trace(next(iter(measured.values())).events)), encoding="utf-8")
    if args.png is not None:
        panels = {row[0]: found.events for row, found in zip(rows, measured.values(), strict=True)}
        draw_steps({str(name): events for name, events in panels.items()}, PICTURE_STEPS, args.png)


if __name__ == "__main__":
    main()
