"""What it costs that a rank is a process: step overhead, bytes a step, news of a death, idle processor time, start-up.

    python -m benchmarks.process_boundary [--steps 2000] [--idle-seconds 5]
    python -m benchmarks.process_boundary --executors multiproc ray [--steps 2000]

The second command compares steps only: the executors run them in turns. Those of Ray need a cluster (RAY_ADDRESS).

The worker does nothing, so a step's time is the executor's own: encode, two switches to another process, decode, future. Goals:
a death is known in 100 ms, idle processes use 2 % of a core together, two workers start in 1.3 times the time of one.
Start-up is that of real workers with the embedded model: they import torch, meet, and load.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.shared.report import emit, percentile, print_table, verdict
from inflight import LLM
from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.mixers import AttentionSpec, RopeConfig
from inflight.config.ranks import Place
from inflight.config.resolve import resolve
from inflight.errors import WorkerDiedError
from inflight.executor.executor import Executor
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.ray_executor import RayExecutor
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.codec import encode
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.messages import ExecuteModel, StepReply
from inflight.interface.step import BlockTableDelta, ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase

WORKER_CLASS = "benchmarks.overhead.process_boundary:NoOpWorker"
BATCHES = (1, 64)
WARM_UP_STEPS = 100


class NoOpWorker(WorkerBase):
    """Answers each step with a token for each of its rows."""

    def __init__(self, config: EngineConfig, place: Place, rendezvous: Rendezvous | None) -> None:
        del config, place, rendezvous

    def load_model(self) -> None:
        pass

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {}

    def determine_available_memory(self) -> int:
        return 0

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return answer(scheduler_output)

    def execute_dummy_batch(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()


def answer(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=plan.num_computed_tokens)


def decode_plan(step_id: int, batch: int) -> SchedulerOutput:
    """A step in which `batch` requests decode, and one in sixteen gets a new block."""
    rows = np.arange(batch, dtype=np.int32)
    new_blocks = rows[:: min(16, batch)]
    return SchedulerOutput(
        step_id=step_id,
        new_requests=(),
        request_ids=tuple(f"request-{row}" for row in range(batch)),
        slots=rows,
        num_computed_tokens=rows + 500,
        num_scheduled_tokens=np.ones(batch, dtype=np.int32),
        samples=np.ones(batch, dtype=np.bool_),
        block_table_deltas=(BlockTableDelta(slots=new_blocks, columns=new_blocks, block_ids=new_blocks),),
    )


def make_config(num_ranks: int) -> EngineConfig:
    architecture = ModelArchitecture(
        name="NoOp",
        vocab_size=16,
        hidden_size=8,
        layers=(
            LayerSpec(
                mixer=AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, rope=RopeConfig()),
                mlp=GatedMlpSpec(size=8),
            ),
        ),
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
    )
    machine = Machine(device="cpu", num_cores=1, dtypes=("float32",))
    args = EngineArgs(tensor_parallel_size=num_ranks)
    return resolve(args, folder=Path("/"), architecture=architecture, machine=machine, timeout_seconds=60.0)


def step_microseconds(executor: Executor, batch: int, num_steps: int, first: int = 0) -> list[float]:
    plans = [decode_plan(first + index, batch) for index in range(num_steps + WARM_UP_STEPS)]
    times = []
    for plan in plans:
        start = time.perf_counter_ns()
        executor.execute_model(plan)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times[WARM_UP_STEPS:]


MAKERS: dict[str, Callable[[], Executor]] = {  # name, and how many ranks
    "uniproc": lambda: UniProcExecutor(make_config(1), NoOpWorker),
    "multiproc": lambda: MultiprocExecutor(make_config(1), WORKER_CLASS),
    "multiproc-2": lambda: MultiprocExecutor(make_config(2), WORKER_CLASS),
    "ray": lambda: RayExecutor(make_config(1), WORKER_CLASS),
    "ray-2": lambda: RayExecutor(make_config(2), WORKER_CLASS),
}


def compare(names: Sequence[str], num_steps: int, num_rounds: int) -> None:
    """All executors live at the same time, and run their steps in turns: a slow moment of the machine meets all of them."""
    executors = {name: MAKERS[name]() for name in names}
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    num_each = num_steps // num_rounds
    for turn, batch in enumerate(BATCHES * num_rounds):
        for name, executor in executors.items():
            times[name, batch] += step_microseconds(executor, batch, num_each, turn * (num_each + WARM_UP_STEPS))
    for executor in executors.values():
        executor.shutdown()
    medians = {key: percentile(found, 0.5) for key, found in times.items()}
    for (name, batch), median in medians.items():
        emit(executor=name, batch=batch, step_us_p50=median, ratio=median / medians[names[0], batch])
    rows = [
        [name, batch, round(p50), f"{p50 / medians[names[0], batch]:.3f}"] for (name, batch), p50 in medians.items()
    ]
    print_table(["executor", "batch", "us p50", f"of {names[0]}"], rows)


def death_milliseconds() -> float:
    executor = MultiprocExecutor(make_config(2), WORKER_CLASS)
    pid = executor.collective_rpc("pid")[1]
    os.kill(pid, signal.SIGSTOP)  # so that the step is under way
    future = executor.execute_model(decode_plan(0, 1), non_block=True)
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    error = future.exception()
    seconds = time.perf_counter() - start
    assert isinstance(error, WorkerDiedError), error
    executor.shutdown()
    return seconds * 1e3


def idle_share(seconds: float) -> float:
    """Of one core, all processes together: the engine's and two workers'."""

    def processor_seconds() -> float:
        ticks = 0
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    executor = MultiprocExecutor(make_config(2), WORKER_CLASS)
    pids = [os.getpid(), *executor.collective_rpc("pid")]
    before = processor_seconds()
    time.sleep(seconds)
    used = processor_seconds() - before
    executor.shutdown()
    return used / seconds


def start_up_seconds() -> dict[str, float]:
    """Median of five starts of an engine, in turns."""
    layouts = {"one": (1, 1), "tensor parallel": (2, 1), "pipeline": (1, 2)}
    times: dict[str, list[float]] = {name: [] for name in layouts}
    for _ in range(5):
        for name, (tp, pp) in layouts.items():
            start = time.perf_counter()
            with LLM(
                tensor_parallel_size=tp,
                pipeline_parallel_size=pp,
                distributed_executor_backend="mp",
                kv_cache_memory_bytes=1 << 26,
            ):
                times[name].append(time.perf_counter() - start)
    return {name: percentile(seconds, 0.5) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument("--executors", nargs="+", choices=MAKERS, help="compare the steps of these only")
    parser.add_argument("--rounds", type=int, default=5, help="of a comparison")
    options = parser.parse_args()
    logging.getLogger("inflight").setLevel(logging.CRITICAL)  # deaths are meant here
    if options.executors:
        compare(options.executors, options.steps, options.rounds)
        return
    rows = []
    for name in ("uniproc", "multiproc", "multiproc-2"):
        for batch in BATCHES:
            executor = MAKERS[name]()
            times = step_microseconds(executor, batch, options.steps)
            executor.shutdown()
            p50, p99 = (round(percentile(times, share)) for share in (0.5, 0.99))
            emit(executor=name, batch=batch, step_us_p50=p50, step_us_p99=p99)
            plan = decode_plan(0, batch)
            num_bytes = [0, 0]
            if name != "uniproc":
                reply = StepReply(epoch=0, step_id=0, rank=0, output=answer(plan))
                messages = (ExecuteModel(epoch=0, scheduler_output=plan), reply)
                num_bytes = [encode(message).num_bytes for message in messages]
            rows.append([name, batch, p50, p99, *num_bytes])
    print_table(["executor", "batch", "us p50", "us p99", "bytes out", "bytes back"], rows)

    deaths = [death_milliseconds() for _ in range(5)]
    share = idle_share(options.idle_seconds)
    start_up = start_up_seconds()
    one, two = start_up.pop("one"), max(start_up.values())
    emit(death_ms=deaths, idle_share_of_a_core=share, start_up_seconds={"one": one, **start_up})
    print_table(
        ["", "value", "goal", ""],
        [
            ["SIGKILL to error, worst of 5", f"{max(deaths):.1f} ms", "100 ms", verdict(max(deaths) < 100)],
            ["idle, three processes", f"{share:.2%} of a core", "2 %", verdict(share < 0.02)],
            ["start-up of one worker", f"{one:.3f} s", "", ""],
            [
                "start-up of two workers, the slower layout",
                f"{two:.3f} s",
                f"{1.3 * one:.3f} s",
                verdict(two <= 1.3 * one),
            ],
        ],
    )


if __name__ == "__main__":
    main()
