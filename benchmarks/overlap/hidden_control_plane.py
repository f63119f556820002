"""Whether the engine's work hides behind the device's: steps of a device that takes 5 ms, with the engine and without it.

    python -m benchmarks.hidden_control_plane [--steps 600] [--cases plain grammar-32 grammar-256] [--models FOLDER]

256 requests decode on a mock device (`mock_device.py`) in a process of its own; their text is detokenised as it comes.
*Alone*, the same worker is fed with the plans of that very run, two in flight, as fast as it goes: no scheduler, no masks,
no commits. Goals at depth 2: a step takes at most 1.05 times as long as alone, 1.1 times with 32 rows under a JSON schema and a
vocabulary of 4,096. `grammar-256` puts all rows under it, with a vocabulary of 151,936 (the tokenizer has 4,000 tokens); there
logits and sampling of the mock device are real work for the processor, 20 ms each.

Grammars end: a request that has ended is followed by another one, whose prompt is part of the next step.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.overlap.mock_device import WORKER_CLASS
from benchmarks.shared.models import DEFAULT_MODELS_FOLDER, model_folder
from benchmarks.shared.report import allow_slow_steps, emit, percentile, print_table, verdict
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.parse_architecture import parse_architecture
from inflight.config.resolve import resolve
from inflight.engine.core.chrome_trace import chrome_trace
from inflight.engine.core.engine_core import EngineCore
from inflight.engine.core.step_figures import RankFigures, step_figures
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.start.make_core import make_core
from inflight.engine.start.model_files import make_grammars
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.executor.executor import Executor
from inflight.executor.multiproc import MultiprocExecutor
from inflight.hub import read_config
from inflight.interface.codec import Decoder, encode
from inflight.interface.messages import ExecuteModel, StepReply
from inflight.interface.request import EngineCoreOutput
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.timeline import Event

T = TypeVar("T")

NUM_RUNNING = 256
PROMPT_TOKENS = range(8, 40)  # their number differs, so that requests cross into new blocks in different steps
WARM_UP_STEPS = 20
MAX_STEPS = 1500  # the worker's ring keeps five events a step
MAX_MODEL_LEN = 2048
RANK = "rank 0"
SCHEMA = {
    "type": "array",
    "minItems": 40,
    "maxItems": 80,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 40},
            "kind": {"enum": ["inner", "outer", "left", "right"]},
            "amount": {"type": "integer", "minimum": 0, "maximum": 99999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "kind", "amount", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    num_grammar_rows: int
    vocab_size: int
    goal: float | None  # a step's time over the time of one alone, at depth 2
    max_steps: int = MAX_STEPS


CASES = {
    "plain": Case(num_grammar_rows=0, vocab_size=4096, goal=1.05),
    "grammar-32": Case(num_grammar_rows=32, vocab_size=4096, goal=1.1),
    "grammar-256": Case(num_grammar_rows=256, vocab_size=151_936, goal=None, max_steps=40),
}


class RecordingExecutor(MultiprocExecutor):
    """Keeps every plan, and how long it took to encode and send it."""

    def __init__(self, config: EngineConfig) -> None:
        self.plans: list[SchedulerOutput] = []
        self.submit_us: list[float] = []
        super().__init__(config, WORKER_CLASS)

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False, *, budget: float = math.inf
    ) -> Any:  # Any: of two overloads
        start = time.perf_counter_ns()
        future = super().execute_model(scheduler_output, non_block, budget=budget)
        self.submit_us.append((time.perf_counter_ns() - start) / 1e3)
        self.plans.append(scheduler_output)
        return future


class TimedStep:
    """Takes the place of a core's `step`, and keeps how long the last call took."""

    def __init__(self, core: EngineCore) -> None:
        self._step = core.step
        core.step = self  # type: ignore[method-assign]
        self.ns = 0

    def __call__(self) -> list[EngineCoreOutput]:
        start = time.perf_counter_ns()
        try:
            return self._step()
        finally:
            self.ns = time.perf_counter_ns() - start


@dataclass(kw_only=True)
class Measured:
    """Of one run, and of the worker alone."""

    figures: RankFigures
    mean_ms: float  # of the period
    alone: RankFigures
    alone_mean_ms: float
    parts_us: dict[str, tuple[float, float]]  # p50 and p99 of a step
    cores: dict[str, float]  # how many each process kept busy
    num_replaced: int  # requests that ended, and were followed by another
    events: dict[str, list[Event]]  # of the run, and of "rank 0 alone"


class Load:
    """Keeps `NUM_RUNNING` requests running."""

    def __init__(self, engine: LLMEngine, case: Case) -> None:
        self._engine = engine
        self._rng = random.Random(0)
        self._running: dict[str, bool] = {}  # id -> whether it is under a grammar
        self.num_replaced = -NUM_RUNNING
        for index in range(NUM_RUNNING):
            self._add(index < case.num_grammar_rows)

    def step(self) -> None:
        for output in self._engine.step():
            assert not output.error, output.error
            if output.finished:
                self._add(self._running.pop(output.request_id))

    def abort(self) -> None:
        self._engine.abort_requests(self._running)

    def _add(self, is_grammar: bool) -> None:
        grammar = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True) if is_grammar else None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS.stop,
            ignore_eos=not is_grammar,
            structured_outputs=grammar,
        )
        self.num_replaced += 1
        request_id = str(NUM_RUNNING + self.num_replaced)
        prompt = [self._rng.randrange(3, 3900) for _ in range(self._rng.choice(PROMPT_TOKENS))]
        self._running[request_id] = is_grammar
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params, kind=RequestOutputKind.DELTA)


def make_engine(folder: Path, depth: int) -> tuple[LLMEngine, TimedStep, RecordingExecutor]:
    args = EngineArgs(
        model=str(folder),
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=NUM_RUNNING * PROMPT_TOKENS.stop,  # all prompts at once
        max_model_len=MAX_MODEL_LEN,
        load_format="dummy",
        dtype="float32",
        distributed_executor_backend="mp",
        async_scheduling=depth == 2,
        kv_cache_memory_bytes=1 << 31,  # of addresses: no block is ever touched
        num_threads=1,
    )
    config = resolve(
        args,
        folder=folder,
        architecture=parse_architecture(read_config(folder)),
        machine=Machine(device="cpu", num_cores=1, dtypes=("float32",)),
        timeout_seconds=60.0,
    )
    processor = make_input_processor(args, config)
    tokenizer = processor.tokenizer
    executor = RecordingExecutor(config)
    try:
        grammars = None if tokenizer is None else make_grammars(config, lambda: tokenizer)
        step = TimedStep(core := make_core(config, executor, grammars))
    except BaseException:  # an interrupt, too
        executor.shutdown()
        raise
    return LLMEngine(core, executor, processor), step, executor


def measure(case: Case, folder: Path, depth: int, num_steps: int) -> Measured:
    engine, step, executor = make_engine(folder, depth)
    worker_pid: int = executor.collective_rpc("pid", unique_reply_rank=0)
    front_us = []
    try:
        load = Load(engine, case)
        gc.freeze()  # as the command line does
        core = engine.core
        while core.scheduler.num_running < NUM_RUNNING:  # the grammar is being compiled
            load.step()
        for _ in range(WARM_UP_STEPS):
            load.step()
        first, load.num_replaced = len(executor.plans), 0
        busy_before, start = processor_seconds(worker_pid), time.perf_counter()
        for _ in range(num_steps):
            step_start = time.perf_counter_ns()
            load.step()
            front_us.append((time.perf_counter_ns() - step_start - step.ns) / 1e3)
        seconds, busy = time.perf_counter() - start, processor_seconds(worker_pid)
        assert core.scheduler.num_running == NUM_RUNNING, "requests were preempted: this is no steady state"
        plans, submit_us = executor.plans[: first + num_steps], executor.submit_us[first : first + num_steps]
        load.abort()
        # a call of the worker waits for the steps in flight, and these wait for their masks
        while core.has_unfinished_requests():
            core.step()
        events = {
            process: [event for event in found if event.step_id <= plans[-1].step_id]
            for process, found in engine.timeline_events(first_step=plans[first].step_id).items()
        }
        alone_events = replay(executor, plans)[RANK][-5 * num_steps :]
    finally:
        engine.close()
    figures = step_figures(events)
    engine_us = {phase: (each.p50, each.p99) for phase, each in figures.engine_phases.items() if phase != "wait"}
    return Measured(
        figures=figures.ranks[RANK],
        mean_ms=mean_period_ms(events[RANK]),
        alone=step_figures({"engine": [], RANK: alone_events}).ranks[RANK],
        alone_mean_ms=mean_period_ms(alone_events),
        parts_us={
            **{f"engine: {phase}": each for phase, each in engine_us.items()},
            "engine: encode and send the plan": spread(submit_us),
            "engine: output processing, detokenisation": spread(front_us),
            **codec_us(plans[first:]),
            **{
                f"worker: {phase}": (each.p50, each.p99)
                for phase, each in figures.ranks[RANK].phases.items()
                if phase in ("prepare", "receive", "sample", "drain")
            },
        },
        cores={name: (busy[name] - busy_before[name]) / seconds for name in busy},
        num_replaced=load.num_replaced,
        events={**events, f"{RANK} alone": alone_events},
    )


def processor_seconds(worker_pid: int) -> dict[str, float]:
    """Used so far, of both processes. Linux only."""
    fields = Path(f"/proc/{worker_pid}/stat").read_text().rpartition(")")[2].split()
    return {"engine": time.process_time(), "worker": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")}


def replay(executor: Executor, plans: Sequence[SchedulerOutput]) -> dict[str, list[Event]]:
    """The worker alone: all plans again, two in flight, under new ids, and without their masks."""
    next_id = plans[-1].step_id + 3  # two more may have been planned
    in_flight: deque[Future[ModelRunnerOutput]] = deque()
    no_rows = np.empty(0, dtype=np.int32)
    for step_id, plan in enumerate(plans, start=next_id):
        if len(in_flight) == 2:
            in_flight.popleft().result()
        again = replace(plan, step_id=step_id, grammar_rows=no_rows)
        in_flight.append(executor.execute_model(again, non_block=True))
    return {RANK: executor.collective_rpc("timeline_events", unique_reply_rank=0)}


def mean_period_ms(rank: Sequence[Event]) -> float:
    ends = [event.end_ns for event in rank if event.phase == "sample"]
    return (ends[-1] - ends[0]) / (len(ends) - 1) / 1e6


def spread(values: Sequence[float]) -> tuple[float, float]:
    return percentile(values, 0.5), percentile(values, 0.99)


def codec_us(plans: Sequence[SchedulerOutput]) -> dict[str, tuple[float, float]]:
    """What runs in the processes' other threads, measured here by itself."""
    times: dict[str, list[float]] = {
        "worker: decode the plan": [],
        "worker: encode the answer": [],
        "engine: decode it": [],
    }
    decoder = Decoder()

    def add(name: str, call: Callable[[], T]) -> T:
        start = time.perf_counter_ns()
        result = call()
        times[name].append((time.perf_counter_ns() - start) / 1e3)
        return result

    for plan in plans[:200]:
        add("worker: decode the plan", partial(decoder.decode, encode(ExecuteModel(epoch=0, scheduler_output=plan))))
        output = ModelRunnerOutput(
            step_id=plan.step_id, sampled_token_ids=np.arange(int(plan.samples.sum()), dtype=np.int32)
        )
        reply = StepReply(epoch=0, step_id=plan.step_id, rank=0, output=output)
        add("engine: decode it", partial(decoder.decode, add("worker: encode the answer", partial(encode, reply))))
    return {name: spread(values) for name, values in times.items()}


def large_vocabulary(folder: Path, vocab_size: int, target: Path) -> Path:
    """The same model and tokenizer, with more tokens than the tokenizer has."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="[all]")
    parser.add_argument("--depths", nargs="+", type=int, choices=(1, 2), default=[1, 2], help="[1 2]")
    parser.add_argument("--steps", type=int, default=600, help=f"steps timed, at most {MAX_STEPS} [%(default)s]")
    parser.add_argument(
        "--models", type=Path, default=DEFAULT_MODELS_FOLDER, help="where the model is kept [%(default)s]"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Chrome trace of the last run")
    options = parser.parse_args()
    if not 2 <= options.steps <= MAX_STEPS:
        parser.error(f"--steps must be from 2 to {MAX_STEPS}")
    allow_slow_steps()
    small = model_folder("llama-tiny", options.models)
    table: list[list[object]] = []
    parts: dict[str, dict[str, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.cases:
            case = CASES[name]
            folder = small
            if case.vocab_size != read_config(small)["vocab_size"]:
                folder = large_vocabulary(small, case.vocab_size, Path(temporary) / name)
            for depth in options.depths:
                found = measure(case, folder, depth, min(options.steps, case.max_steps))
                parts[f"{name}, depth {depth}"] = found.parts_us
                table.append(report(name, case, depth, found))
    if options.trace is not None:
        options.trace.write_text(json.dumps(chrome_trace(found.events)))
    header = ["case", "depth", "alone ms", "mean", "step ms", "mean", "ratio", "idle p50 us", "p99", "idle", "hidden"]
    print_table([*header, "cores engine", "worker", "forward ms", "new", "goal"], table)
    names = list(dict.fromkeys(part for found in parts.values() for part in found))
    cells = [
        [part, *(" / ".join(f"{us:.0f}" for us in found.get(part, ())) for found in parts.values())] for part in names
    ]
    print_table(["us per step, p50 / p99", *parts], cells)


def report(name: str, case: Case, depth: int, found: Measured) -> list[object]:
    """One row of the table, and its JSON line."""
    figures, alone = found.figures, found.alone
    assert figures.period is not None and figures.idle is not None and alone.period is not None
    assert figures.idle_share is not None and figures.hidden_share is not None
    ratio = figures.period.p50 / alone.period.p50
    emit(
        benchmark="hidden_control_plane", case=name, depth=depth, alone=asdict(alone), alone_mean_ms=found.alone_mean_ms,
        figures=asdict(figures), mean_ms=found.mean_ms, ratio=ratio, cores=found.cores, parts_us=found.parts_us,
    )  # fmt: skip
    goal = case.goal if depth == 2 else None
    return [
        name,
        depth,
        f"{alone.period.p50 / 1e3:.2f}",
        f"{found.alone_mean_ms:.2f}",
        f"{figures.period.p50 / 1e3:.2f}",
        f"{found.mean_ms:.2f}",
        f"{ratio:.3f}",
        f"{figures.idle.p50:.0f}",
        f"{figures.idle.p99:.0f}",
        f"{figures.idle_share:.1%}",
        f"{figures.hidden_share:.1%}",
        f"{found.cores['engine']:.2f}",
        f"{found.cores['worker']:.2f}",
        f"{figures.phases['forward'].p50 / 1e3:.2f}",
        found.num_replaced,
        "" if goal is None else f"<= {goal} {verdict(ratio <= goal)}",
    ]


if __name__ == "__main__":
    main()
