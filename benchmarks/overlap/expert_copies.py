"""What copies of busy experts bring and cost: two replicas with one rank of one thread each, and a router that chooses mostly
experts of the first rank.

    python -m benchmarks.expert_copies [--rounds 3] [--running 4] [--steps 300] [--realtime]

Each replica is an engine core with a rank in a process of its own, and `--running` requests decode in it. The router has a
bias for the choice, as in DeepSeek-V3: with it every token chooses the same 8 of 32 experts, all of the first rank. After
`--steps` steps the ranks decide on copies, which come beside the steps. The worker notes when each step begins, how long its
compute thread has worked, and which step is the first with copies.

Goals: tokens/s with copies at least 1.3 times as many as before, or, if the machine is busy with other programs, 1 / 1.3 of the
work of the busier compute thread; and the longest step from the decision to the first step with copies at most 1.05 times the
longest of as many steps before it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from benchmarks.overlap.lockstep import Listener, follow, has_to_meet, start_replicas
from benchmarks.shared.report import allow_slow_steps, emit, print_table, verdict
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.start.make_core import make_core
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.executor.multiproc import MultiprocExecutor
from inflight.sampling_params import SamplingParams
from inflight.worker.expert_worker import ExpertRunner, ExpertWorker

NUM_REPLICAS = 2
NUM_BUSY = 8
WARM_UP_STEPS = 50
MIN_SPEED_UP = 1.3
MAX_LONGEST = 1.05
MODEL = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "tie_word_embeddings": True,
}


class SkewedExpertWorker(ExpertWorker):
    """Its router prefers the first experts. It notes when steps begin, and which of them is the first with copies."""

    def load_model(self) -> None:
        super().load_model()
        runner = self.runner
        assert isinstance(runner, ExpertRunner)
        with torch.inference_mode():
            for each in runner._mixtures:
                cast("Any", each).router.choice_bias[:NUM_BUSY] += 1.0
        self._starts: list[tuple[float, float]] = []
        self._switched_at: list[int] = []
        balancer = runner.balancer
        before_step, switch = balancer.before_step, balancer._switch

        def noted_step() -> None:
            if balancer._group.is_together:
                if not self._starts and balancer._mover is not None:
                    mover = balancer._mover._thread.native_id
                    os.sched_setscheduler(mover or 0, os.SCHED_OTHER, os.sched_param(0))  # its priority is a low one
                self._starts.append((time.perf_counter(), time.thread_time()))
            before_step()

        def noted_switch(target: Any) -> None:
            self._switched_at.append(balancer._num_steps - 1)  # the last step has used them
            switch(target)

        cast("Any", balancer).before_step, cast("Any", balancer)._switch = noted_step, noted_switch

    def steps(self) -> tuple[list[tuple[float, float]], list[int]]:
        """When each step began: on the clock, and in seconds of the compute thread; and which are the first with copies."""
        return self._starts, self._switched_at


def run_replica(config: EngineConfig, args: EngineArgs, num_running: int, num_steps: int, pipe: Connection) -> None:
    """One replica, in a process of its own. Sends what its worker has noted."""
    executor = MultiprocExecutor(config, "benchmarks.overlap.expert_copies:SkewedExpertWorker")
    listener = Listener()
    engine = LLMEngine(make_core(config, executor, None, listener), executor, make_input_processor(args, config))
    pipe.send("ready")
    pipe.recv()
    follow(engine, listener, lambda: not has_to_meet(engine))
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    for index in range(num_running):
        engine.add_request(str(index), [index + 3] * 4, params)
    while engine.has_unfinished_requests():
        engine.step()
    pipe.send("done")
    follow(engine, listener, pipe.poll)
    pipe.send(executor.collective_rpc("steps")[0])
    pipe.recv()
    pipe.recv()
    engine.close()


def make_realtime(pids: Sequence[int]) -> None:
    """Give all threads of these processes and of their children real-time priority."""
    for pid in pids:
        tasks = Path(f"/proc/{pid}/task")
        for task in tasks.iterdir():
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))
            make_realtime([int(child) for child in (task / "children").read_text().split()])


class Measured(NamedTuple):
    """
    Attributes:
        periods: of all steps, in seconds.
        work: of all steps, the seconds that the busier of the two compute threads has worked.
        switch: the number of the first step with copies.
    """

    periods: list[float]
    work: list[float]
    switch: int


def measure(folder: Path, *, num_running: int, interval: int, is_realtime: bool) -> Measured:
    args = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=num_running,
        kv_cache_memory_bytes=1 << 26,
        num_threads=1,
        distributed_executor_backend="mp",
        fault_tolerance_config={"spare_workers": 0},
        data_parallel_size=NUM_REPLICAS,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config={"step_interval": interval, "window_size": interval, "num_redundant_experts": NUM_BUSY},
    )
    pipes, processes = start_replicas(args, run_replica, num_running, 2 * interval - 5)
    for word in ("ready", "done"):
        assert [pipe.recv() for pipe in pipes] == [word] * NUM_REPLICAS
        if word == "ready" and is_realtime:
            make_realtime([each.pid or 0 for each in processes])
        for pipe in pipes:
            pipe.send("go on")
    (starts, switched_at), (other_starts, _) = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("end")
        pipe.send("end")
    for process in processes:
        process.join()
    assert switched_at, "the copies have not come"
    (periods, work), (_, other_work) = (
        zip(*((end[0] - begin[0], end[1] - begin[1]) for begin, end in itertools.pairwise(each)), strict=True)
        for each in (starts, other_starts)
    )
    return Measured(list(periods), list(map(max, work, other_work)), switched_at[0])


class Ratios(NamedTuple):
    """
    Attributes:
        tokens: per second, with copies / before.
        work: of the busier compute thread, before / with copies.
        longest: of the steps from the decision to the switch / the longest of as many steps before the decision.
        of_median: the same / the median before the decision.
        middle: the median of the steps from the decision to the switch / the median before.
    """

    tokens: float
    work: float
    longest: float
    of_median: float
    middle: float


def ratios(found: Measured, interval: int) -> Ratios:
    before, moving, after = slice(WARM_UP_STEPS, interval), slice(interval, found.switch), slice(found.switch + 1, -5)
    tokens, work = (
        statistics.median(each[before]) / statistics.median(each[after]) for each in (found.periods, found.work)
    )
    longest = max(found.periods[moving])
    num_moving = found.switch - interval
    longest_before = max(found.periods[interval - num_moving : interval])
    median = statistics.median(found.periods[before])
    middle = statistics.median(found.periods[moving])
    return Ratios(tokens, work, longest / longest_before, longest / median, middle / median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--running", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--realtime", action="store_true", help="steps have real-time priority, beside other programs")
    given = parser.parse_args()
    allow_slow_steps()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for _ in range(given.rounds):
            measured = measure(
                Path(folder), num_running=given.running, interval=given.steps, is_realtime=given.realtime
            )
            found.append(ratios(measured, given.steps))
            before = slice(WARM_UP_STEPS, given.steps)
            emit(
                median_ms=round(statistics.median(measured.periods[before]) * 1e3, 2),
                work_ms=round(statistics.median(measured.work[before]) * 1e3, 2),
                steps_until_copies=measured.switch - given.steps,
                **{name: round(value, 3) for name, value in found[-1]._asdict().items()},
            )
    tokens, work, longest, of_median, middle = (statistics.median(column) for column in zip(*found, strict=True))
    print_table(
        ["", "ratio", "goal", ""],
        [
            ["tokens/s with copies / before", f"{tokens:.2f}", f"{MIN_SPEED_UP}", verdict(tokens >= MIN_SPEED_UP)],
            [
                "work of the busier thread before / with copies",
                f"{work:.2f}",
                f"{MIN_SPEED_UP}",
                verdict(work >= MIN_SPEED_UP),
            ],
            [
                "longest step while they come / before",
                f"{longest:.2f}",
                f"{MAX_LONGEST}",
                verdict(longest <= MAX_LONGEST),
            ],
            ["longest step while they come / median before", f"{of_median:.2f}", "", ""],
            ["median step while they come / before", f"{middle:.2f}", "", ""],
        ],
    )


if __name__ == "__main__":
    main()
