"""Steps prepared ahead of their results give the tokens of steps run one by one, on the real worker, in every layout."""

from __future__ import annotations

import copy
import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.parse_architecture import parse_architecture
from inflight.config.resolve import Machine, resolve
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.request import ResolvedSampling
from inflight.kv_cache.sizing import make_kv_cache_configs
from inflight.sampling_params import SamplingParams
from tests.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model
from tests.unit.worker.plan_ahead import Job, PlanAhead

NUM_SEEDS = 60 if os.environ.get("INFLIGHT_TEST_FULL") == "1" else 2
BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 4, 64, 400
HAPPENS = ("num_preemptions", "num_forced", "num_superseded", "num_late_masks")
LAYOUTS = {"one rank": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "pp3": (1, 3), "tp2-pp2": (2, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = copy.deepcopy(FAMILY_CONFIGS["qwen3"][4])  # tied, one layer of three has no window
    return write_model(config, tmp_path_factory.mktemp("ahead") / "model", seed=1)


@dataclass
class Driven:
    executor: UniProcExecutor
    num_groups: int
    step_ids: Iterator[int] = field(default_factory=itertools.count)


def make_executor(folder: Path, tp: int, pp: int, num_slots: int) -> Driven:
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_slots,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        num_threads=1,
    )
    config = resolve(
        args,
        folder=folder,
        architecture=parse_architecture(json.loads((folder / "config.json").read_text())),
        machine=Machine(device="cpu", num_cores=1, dtypes=("float32",)),
        timeout_seconds=30.0,
    )
    executor = UniProcExecutor(config)
    specs = executor.get_kv_cache_specs()
    configs = make_kv_cache_configs(specs, [1 << 23] * len(specs), max_model_len=64, max_step_tokens=64)
    assert configs[0].num_blocks >= NUM_BLOCKS
    executor.initialize_from_config(configs)
    return Driven(executor, len(configs[0].groups))


def make_jobs(seed: int) -> list[Job]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 0.5},
        {"temperature": 1.0, "frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.0, "logit_bias": {5: 3.0}, "repetition_penalty": 0.7},
        {"temperature": 1.0},
    ]
    jobs = []
    for i in range(9):
        params = SamplingParams(**kinds[(i + seed) % len(kinds)])
        words = ((3 + i, 7), (9,)) if i % 4 == 0 else ()
        sampling = ResolvedSampling(
            params=params, seed=100 * seed + i, max_tokens=1 + (5 * i + seed) % 11, bad_words_token_ids=words
        )
        prompt = [(7 * i + 3 * j + seed) % VOCAB_SIZE for j in range(1 + (4 * i + seed) % 13)]
        jobs.append(Job(f"r{i}", prompt, sampling, has_grammar=(i + seed) % 3 > 0))
    return jobs


def planner(
    driven: Driven, jobs: list[Job], *, depth: int, num_slots: int, max_chunk: int, seed: int, forces: bool = True
) -> PlanAhead:
    return PlanAhead(
        driven.executor,
        jobs,
        step_ids=driven.step_ids,
        depth=depth,
        num_slots=num_slots,
        block_size=BLOCK_SIZE,
        num_groups=driven.num_groups,
        num_blocks=NUM_BLOCKS,
        max_chunk=max_chunk,
        seed=seed,
        vocab_size=VOCAB_SIZE,
        forces=forces,
    )


def drive(driven: Driven, seed: int, **how: Any) -> tuple[list[list[int]], PlanAhead]:
    jobs = make_jobs(seed)
    ahead = planner(driven, jobs, seed=seed, **how)
    ahead.run()
    assert all(len(job.tokens) == job.end for job in jobs)
    return [job.tokens[len(job.prompt) :] for job in jobs], ahead


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[Any]:
    """Of each seed: one rank, one slot, one step at a time, whole prompts; a forced token makes it a new request."""
    driven = make_executor(folder, 1, 1, 1)
    how = {"depth": 1, "num_slots": 1, "max_chunk": MAX_MODEL_LEN, "forces": False}
    found = [drive(driven, seed, **how)[0] for seed in range(NUM_SEEDS)]
    driven.executor.shutdown()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_depth_of_the_queue_changes_no_token(folder: Path, truth: list[Any], layout: str) -> None:
    driven = make_executor(folder, *LAYOUTS[layout], 3)
    counts: Counter[str] = Counter()
    for depth in (1, 2, 3, 5):
        for seed in range(NUM_SEEDS):
            tokens, ahead = drive(driven, seed, depth=depth, num_slots=3, max_chunk=5)
            assert tokens == truth[seed], (depth, seed)
            counts.update({name: getattr(ahead, name) for name in HAPPENS})
    assert min(counts[name] for name in HAPPENS) > 2 * NUM_SEEDS, counts
    driven.executor.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("inflight-")]


def test_prepare_does_not_wait_for_the_step_before(folder: Path) -> None:
    """With the compute thread held up, three steps are taken in all the same."""
    driven = make_executor(folder, 1, 2, 3)
    executor, go_on = driven.executor, threading.Event()
    runner = executor._ranks[0]._loop._worker.runner  # type: ignore[union-attr]
    execute = runner.execute_model

    def held(*arguments: Any) -> Any:
        go_on.wait(10)
        return execute(*arguments)

    runner.execute_model = held
    jobs = [Job("r", [3, 4, 5], ResolvedSampling(params=SamplingParams(temperature=0.0), seed=0, max_tokens=9))]
    ahead = planner(driven, jobs, depth=3, num_slots=3, max_chunk=5, seed=1)
    plans = []
    for _ in range(3):
        while not (rows := ahead.choose()):
            pass
        plans.append(ahead.submit(rows).future)
    workers = [executor._ranks[rank]._loop._worker for rank in range(2)]  # type: ignore[union-attr]
    for worker in workers:
        wait_for(lambda worker=worker: sum(event.phase == "prepare" for event in worker.timeline_events()) == 3)
    assert not any(future.done() for future in plans)
    assert executor._activity(0) == "running steps 0, 1, 2"
    go_on.set()
    for future in plans:
        future.result(timeout=10)
    executor.shutdown()


def wait_for(condition: Any) -> None:
    tick = threading.Event()
    for _ in range(500):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it never came true")
