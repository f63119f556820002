"""How long the engine's own work takes per step while many requests decode: what the device may have to wait for.

    python -m benchmarks.control_plane [--running 64 256] [--steps 500] [--models FOLDER]

Times come from the timelines that are always on: `plan` and `commit` of the engine core, `prepare`, `forward` and `sample` of
the worker. Goals: plan + prepare under 1 ms at 64 running requests, and under 3 ms at 256 (p50; p99 is shown beside it).
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict

from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import MIB, allow_slow_steps, emit, percentile, print_table, verdict
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.sampling_params import SamplingParams
from inflight.timeline import Event

GOALS_MS = {64: 1.0, 256: 3.0}
WARM_UP_STEPS = 20
MAX_STEPS = 1000  # the worker's ring keeps five events a step
PHASES = ("plan", "prepare", "plan+prepare", "commit", "sample", "forward")


def measure(engine: LLMEngine, num_running: int, num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of each phase in `num_steps` steps in which `num_running` requests decode and nothing else happens."""
    rng = random.Random(num_running)
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_STEPS + num_steps + 300, ignore_eos=True)
    request_ids = [f"{num_running}-{i}" for i in range(num_running)]
    for request_id in request_ids:
        # lengths differ, so that requests cross into new blocks in different steps
        prompt = [rng.randrange(3, 3900) for _ in range(rng.randrange(8, 72))]
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    scheduler = engine.core.scheduler
    while scheduler.num_waiting:
        engine.step()
    for _ in range(WARM_UP_STEPS):  # the last prompts are computed within them
        engine.step()
    first_step = max(event.step_id for event in engine.core.timeline.events()) + 1
    for _ in range(num_steps):
        engine.step()
        assert scheduler.num_running == num_running, "a request ended or was preempted: this is no steady state"
    last_step = first_step + num_steps
    timelines = engine.timeline_events(first_step)
    events = timelines["engine"] + timelines["rank 0"]
    engine.abort_requests(request_ids)
    return by_phase([event for event in events if event.step_id < last_step])


def by_phase(events: list[Event]) -> dict[str, list[float]]:
    """Phase -> milliseconds, one value per step that has all of them."""
    steps: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        steps[event.step_id][event.phase] += event.microseconds / 1e3
    own = [phase for phase in PHASES if "+" not in phase]
    whole = [steps[step_id] for step_id in sorted(steps) if set(own) <= set(steps[step_id])]
    times = {phase: [step[phase] for step in whole] for phase in own}
    times["plan+prepare"] = [step["plan"] + step["prepare"] for step in whole]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduling and input preparation per step.")
    add_model_arguments(parser, "llama-tiny")
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256], help="requests at once [64 256]")
    parser.add_argument("--steps", type=int, default=500, help=f"steps timed, at most {MAX_STEPS} [%(default)s]")
    parser.add_argument(
        "--num-threads", type=int, default=1, help="compute threads; the phases of interest have one [%(default)s]"
    )
    args = parser.parse_args()
    if not 1 <= args.steps <= MAX_STEPS:
        parser.error(f"--steps must be from 1 to {MAX_STEPS}")
    allow_slow_steps()
    engine_args = EngineArgs(
        model=str(model_folder(args.model, args.models)),
        max_num_seqs=max(args.running),
        max_model_len=2048,
        kv_cache_memory_bytes=1024 * MIB,
        skip_tokenizer_init=True,
        num_threads=args.num_threads,
    )
    engine = LLMEngine.from_args(engine_args)
    rows: list[list[object]] = []
    try:
        for num_running in args.running:
            times = measure(engine, num_running, args.steps)
            num_steps = len(times["plan"])
            for phase in PHASES:
                p50, p99 = (round(percentile(times[phase], share), 3) for share in (0.5, 0.99))
                emit(
                    benchmark="control_plane", running=num_running, steps=num_steps, phase=phase, p50_ms=p50, p99_ms=p99
                )
                goal = GOALS_MS.get(num_running) if phase == "plan+prepare" else None
                rows.append([num_running, phase, p50, p99, "" if goal is None else f"< {goal} {verdict(p50 < goal)}"])
    finally:
        engine.close()
    print_table(["running", "phase", "p50 ms", "p99 ms", "goal (p50)"], rows)


if __name__ == "__main__":
    main()
