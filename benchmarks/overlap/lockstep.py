"""What lockstep costs: the steps of two replicas that divide the experts of a mixture, beside those of two that know nothing of
each other, on a device that takes 5 ms.

    python -m benchmarks.lockstep [--steps 400] [--rounds 3] [--running 32]

Each replica is an engine core with a rank in a process of its own, and `--running` requests decode in it. The rank sleeps 5 ms
in each step, then computes a very small mixture; in lockstep its rows meet those of the other replica in each layer. Goals: the
period of a step (p50) in lockstep at most 1.02 times that of free replicas; while no replica has requests, all four processes
together use at most 1 % of a core.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from benchmarks.shared.report import allow_slow_steps, emit, percentile, print_table, verdict
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.core.step_loop import CoreListener
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.start.make_core import make_core
from inflight.engine.start.model_files import resolve_config
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.executor.multiproc import MultiprocExecutor
from inflight.interface.step import ModelRunnerOutput
from inflight.sampling_params import SamplingParams

NUM_REPLICAS = 2
WORKERS = "benchmarks.overlap.sleeping_workers"
WARM_UP_STEPS = 30
IDLE_SECONDS = 10.0
MAX_RATIO = 1.02
MAX_IDLE_SHARE = 0.01
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


class Listener(CoreListener):
    """Wakes the loop as the server does."""

    may_add = True

    def __init__(self) -> None:
        self.news: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        self.news.put(None)

    def wait_for_arrival(self, step: Future[ModelRunnerOutput]) -> bool:
        if step.done():
            return False
        step.add_done_callback(lambda _: self.news.put(None))
        self.news.get()
        return not step.done()


def run_replica(config: EngineConfig, args: EngineArgs, num_running: int, num_steps: int, pipe: Connection) -> None:
    """One replica, in a process of its own. Sends the periods of its steps in milliseconds, then idles until told to end."""
    kind = "SleepingExpertWorker" if config.parallel.is_in_lockstep else "SleepingWorker"
    executor = MultiprocExecutor(config, f"{WORKERS}:{kind}")
    listener = Listener()
    engine = LLMEngine(make_core(config, executor, None, listener), executor, make_input_processor(args, config))
    pipe.send(executor._ranks[0].process.pid)  # type: ignore[union-attr]  # it has started
    pipe.recv()  # all have started
    follow(engine, listener, lambda: getattr(engine.core, "_group", None) is None or not has_to_meet(engine))
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 500, ignore_eos=True)
    ids = [str(index) for index in range(num_running)]
    for request_id in ids:
        engine.add_request(request_id, [int(request_id) + 3] * 8, params)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    ends = [time.perf_counter()]
    for _ in range(num_steps):
        engine.step()
        ends.append(time.perf_counter())
    pipe.send([(end - begin) * 1e3 for begin, end in itertools.pairwise(ends)])
    engine.abort_requests(ids)
    follow(engine, listener, pipe.poll)
    pipe.recv()
    engine.close()


def has_to_meet(engine: LLMEngine) -> bool:
    return bool(cast("Any", engine.core)._group.phase.value != "running")


def follow(engine: LLMEngine, listener: Listener, is_over: Callable[[], bool]) -> None:
    """As the server's loop without requests: sleep until there is news."""
    while not is_over():
        if engine.core.has_unfinished_requests():
            engine.core.step()
            continue
        with contextlib.suppress(Empty):
            listener.news.get(timeout=1.0)  # `is_over` is looked at again


def cpu_seconds(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def start_replicas(
    args: EngineArgs, run: Callable[..., None], num_running: int, num_steps: int
) -> tuple[list[Connection], list[SpawnProcess]]:
    """Starts a process for each replica, which calls `run(config, args, num_running, num_steps, pipe)`. Returns our ends of the
    pipes, and the processes."""
    config = resolve_config(args)
    config = replace(config, parallel=replace(config.parallel, lockstep_secret=secrets.token_hex(16)))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for each in config.replicas():
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(each, args, num_running, num_steps, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    return pipes, processes


def measure(folder: Path, *, is_lockstep: bool, num_running: int, num_steps: int) -> tuple[float, float]:
    """The p50 of a step's period in milliseconds, and which share of a core idle replicas use."""
    args = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=num_running,
        kv_cache_memory_bytes=1 << 28,
        num_threads=1,
        cpu_threads_bind="off",
        distributed_executor_backend="mp",
        fault_tolerance_config={"spare_workers": 0},
        data_parallel_size=NUM_REPLICAS,
        enable_expert_parallel=is_lockstep,
    )
    pipes, processes = start_replicas(args, run_replica, num_running, num_steps)
    pids = [pipe.recv() for pipe in pipes] + [process.pid or 0 for process in processes]
    for pipe in pipes:
        pipe.send("begin")
    periods = [period for pipe in pipes for period in pipe.recv()]
    time.sleep(1.0)  # the last steps
    before = cpu_seconds(pids)
    time.sleep(IDLE_SECONDS)
    idle = (cpu_seconds(pids) - before) / IDLE_SECONDS
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    return percentile(periods, 0.5), idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--running", type=int, default=32)
    given = parser.parse_args()
    allow_slow_steps()
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for _ in range(given.rounds):
            for is_lockstep, results in found.items():
                p50, idle = measure(
                    Path(folder), is_lockstep=is_lockstep, num_running=given.running, num_steps=given.steps
                )
                results.append((p50, idle))
                emit(lockstep=is_lockstep, p50_ms=round(p50, 3), idle_share=round(idle, 4))
    free, locked = (statistics.median(p50 for p50, _ in found[kind]) for kind in (False, True))
    idle = statistics.median(idle for _, idle in found[True])
    ratio = locked / free
    assert not math.isnan(ratio)
    print_table(
        ["", "free", "lockstep", "ratio or goal", ""],
        [
            ["period of a step, p50, ms", f"{free:.3f}", f"{locked:.3f}", f"{ratio:.3f}", verdict(ratio <= MAX_RATIO)],
            [
                "idle, share of a core",
                f"{statistics.median(each for _, each in found[False]):.2%}",
                f"{idle:.2%}",
                f"{MAX_IDLE_SHARE:.0%}",
                verdict(idle <= MAX_IDLE_SHARE),
            ],
        ],
    )


if __name__ == "__main__":
    main()
