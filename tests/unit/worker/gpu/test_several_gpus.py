"""Ranks on GPUs of their own give the tokens of the CPU's: tensor-parallel, in stages, with drafts, with transformers' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.interface.request import ResolvedSampling
from inflight.sampling_params import SamplingParams
from inflight.worker.gpu.graph_model_runner import GraphModelRunner
from inflight.worker.model_runner import ModelRunner
from tests.support.fake_gpus import install_gpus
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.unit.worker.driven import make_executor, planner, workers_of
from tests.unit.worker.plan_ahead import Job

NUM_SLOTS = 2


def tokens(folder: Path, tp: int, pp: int, **how: Any) -> tuple[list[list[int]], set[type]]:
    """(the tokens of each job, the classes of the runners)"""
    jobs = [
        Job(f"r{i}", [7 * i + j % 3 for j in range(7 - i)], ResolvedSampling(params=params, seed=i, max_tokens=4))
        for i, params in enumerate([SamplingParams(temperature=0.0), SamplingParams(top_k=20)])
    ]
    driven = make_executor(folder, tp, pp, NUM_SLOTS, timeout_seconds=60.0, **how)
    kinds = {type(worker.runner) for worker in workers_of(driven)}
    try:
        planner(driven, jobs, seed=1, depth=2, num_slots=NUM_SLOTS, max_chunk=5, forces=False).run()
    finally:
        driven.executor.shutdown()
    return [job.tokens for job in jobs], kinds


@pytest.mark.parametrize(
    ("family", "tp", "pp", "runner", "engine_args"),
    [
        ("qwen3", 2, 2, GraphModelRunner, {"cuda_graph_max_tokens": 4}),
        ("qwen3", 1, 2, ModelRunner, {"max_drafts": 2}),
        ("olmo2", 2, 1, GraphModelRunner, {"cuda_graph_max_tokens": 4}),
        pytest.param("llama", 2, 2, ModelRunner, {"model_impl": "transformers"}, marks=pytest.mark.full_gpu),
    ],
)
def test_the_tokens_are_those_of_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    tp: int,
    pp: int,
    runner: type,
    engine_args: dict[str, Any],
) -> None:
    folder = write_model(FAMILY_CONFIGS[family][0], tmp_path / "model", seed=2)
    expected, _ = tokens(folder, 1, 1)
    install_gpus(monkeypatch, tp * pp)
    found, kinds = tokens(folder, tp, pp, device="cuda", **engine_args)
    assert found == expected
    assert kinds == {runner}
