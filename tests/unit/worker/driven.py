"""A small model on the real worker, in any layout, without an engine: what `PlanAhead` drives."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.resolve import resolve
from inflight.config.unknown_family import describe_model
from inflight.engine.start.kv_cache_sizing import make_kv_cache_configs
from inflight.executor.uniproc import UniProcExecutor
from inflight.worker.worker import Worker
from tests.support.drafts import verify_all_drafts
from tests.support.fake_gpu import GPUS
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model
from tests.unit.worker.plan_ahead import Job, PlanAhead

BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 4, 64, 400


def write_small_model(folder: Path) -> Path:
    config = copy.deepcopy(FAMILY_CONFIGS["qwen3"][4])  # tied, one layer of three has no window
    return write_model(config, folder / "model", seed=1)


@dataclass
class Driven:
    executor: UniProcExecutor
    num_groups: int
    max_drafts: int
    step_ids: Iterator[int] = field(default_factory=itertools.count)


def make_executor(
    folder: Path,
    tp: int,
    pp: int,
    num_slots: int,
    max_drafts: int = 0,
    *,
    device: str = "cpu",
    depth: int = 2,
    timeout_seconds: float = 300.0,
    **engine_args: Any,
) -> Driven:
    """`depth`: the most steps in flight. `timeout_seconds`: of a step.

    `device` "cuda": the test says what `inflight.worker.worker.get_device` makes."""
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_slots,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        num_threads=1 if device == "cpu" else None,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": max_drafts,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
        if max_drafts
        else None,
        **engine_args,
    )
    config = resolve(
        args,
        folder=folder,
        architecture=describe_model(
            json.loads((folder / "config.json").read_text()), engine_args.get("model_impl", "inflight"), device=device
        ),
        machine=Machine(
            device=device, num_cores=1, dtypes=("float32",), gpus=() if device == "cpu" else GPUS * tp * pp
        ),
        timeout_seconds=timeout_seconds,
    )
    config = replace(config, scheduler=replace(config.scheduler, depth=depth))
    with verify_all_drafts():
        executor = UniProcExecutor(config)
    try:
        specs = executor.get_kv_cache_specs()
        configs = make_kv_cache_configs(
            specs, [1 << 23] * len(specs), max_model_len=64, max_step_tokens=64, is_measured=False
        )
        assert configs[0].num_blocks >= NUM_BLOCKS
        executor.initialize_from_config(configs)
    except BaseException:
        executor.shutdown()  # otherwise the threads of its ranks would go on
        raise
    return Driven(executor, len(configs[0].groups), max_drafts)


def workers_of(driven: Driven) -> list[Worker]:
    return [rank.loop._worker for rank in driven.executor._ranks]  # type: ignore[misc]


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
        max_drafts=driven.max_drafts,
    )
