"""The whole engine over the GPU's runner, on a GPU that is not there: its outputs are those of the engine on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight import LLM, RequestOutput, SamplingParams
from inflight.errors import OutOfMemoryError, StepError
from inflight.worker.gpu.graph_model_runner import GraphModelRunner
from tests.support.fake_gpu import COPY_OUT_FIRST, FakeGpu, install
from tests.support.gpu_layers import use_gpu_layers
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

BASE = [5 + i % 40 for i in range(20)]
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (BASE, {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1}),
    ([*BASE, 7, 9], {"temperature": 0.8, "top_p": 0.8, "seed": 3, "n": 2}),
    ([4, 8, 15, 16, 23, 42], {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "min_tokens": 2}),
]
STAGES = ["_stage_entries", "_enqueue_draws"]
ARGUMENTS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 48,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,  # the first prompt takes two steps
    "block_size": 4,
    "kv_cache_memory_bytes": 1 << 20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["llama"][0], tmp_path_factory.mktemp("gpu") / "model", seed=2)


def generate(llm: LLM, requests: list[tuple[list[int], dict[str, Any]]] = REQUESTS) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [SamplingParams(max_tokens=5, ignore_eos=True, **fields) for _, fields in requests]
    return llm.generate(prompts, params, use_tqdm=False)


def figures(outputs: list[RequestOutput]) -> tuple[list[list[int]], list[float]]:
    """(tokens of all completions, all log-probabilities)"""
    tokens = [list(completion.token_ids) for output in outputs for completion in output.outputs]
    columns = [
        *(position for output in outputs for position in output.prompt_logprobs or () if position is not None),
        *(position for output in outputs for completion in output.outputs for position in completion.logprobs or ()),
    ]
    return tokens, [entry.logprob for position in columns for entry in position.values()]


@pytest.mark.parametrize("engine_args", [{"cuda_graph_max_tokens": 8}, {"speculative_config": {"method": "ngram"}}])
def test_outputs_are_those_of_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine_args: dict[str, Any]
) -> None:
    with LLM(str(folder), device="cpu", **ARGUMENTS) as llm:
        expected, expected_logprobs = figures(generate(llm))
    install(monkeypatch, FakeGpu(order=COPY_OUT_FIRST))
    with LLM(str(folder), device="cuda", **ARGUMENTS, **engine_args) as llm:
        found, logprobs = figures(generate(llm))
        (again,) = generate(llm, REQUESTS[2:])
    assert found == expected
    assert logprobs and np.allclose(logprobs, expected_logprobs, atol=1e-4)
    assert list(again.outputs[0].token_ids) == expected[-1] and again.num_cached_tokens > 0


def test_a_mixture_of_experts_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are computed by the Triton kernels."""
    folder = write_model(FAMILY_CONFIGS["qwen2_moe"][0], tmp_path / "model", seed=2)
    with LLM(str(folder), device="cpu", **ARGUMENTS) as llm:
        expected, _ = figures(generate(llm))
    install(monkeypatch, gpu := FakeGpu(order=COPY_OUT_FIRST))
    use_gpu_layers(monkeypatch)
    with LLM(str(folder), device="cuda", cuda_graph_max_tokens=4, **ARGUMENTS) as llm:
        found, _ = figures(generate(llm))
    assert found == expected and gpu.num_graphs > 0


@pytest.mark.parametrize(
    ("stages", "requests"),
    [
        (STAGES * 2, [REQUESTS[2], ([7, 9, 7], {"temperature": 0.0})]),
        *(pytest.param([stage] * 4, REQUESTS, marks=pytest.mark.full_gpu) for stage in STAGES),
    ],
    ids=["by turns", *STAGES],
)
def test_after_steps_that_fail_the_tokens_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stages: list[str], requests: list[tuple[list[int], dict[str, Any]]]
) -> None:
    """Each fault is the end of an epoch: staging slots and graphs are new, the model and the blocks stay. There are three
    staging slots, and four steps fail."""
    install(monkeypatch, FakeGpu(order=COPY_OUT_FIRST))
    with LLM(str(folder), device="cuda", **{**ARGUMENTS, "max_num_seqs": len(requests)}) as llm:
        expected = [list(output.outputs[0].token_ids) for output in generate(llm, requests)]
        for stage in stages:
            with monkeypatch.context() as patch:
                patch.setattr(GraphModelRunner, stage, failing_in_the_second_call(getattr(GraphModelRunner, stage)))
                assert [list(output.outputs[0].token_ids) for output in generate(llm, requests)] == expected
        assert llm.llm_engine.core.fault_status().num_recoveries == {"step_failed": 4}


@pytest.mark.parametrize("stage", STAGES)
def test_steps_that_fail_leave_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """There are three staging slots, and four steps fail, each with a younger one in flight."""
    install(monkeypatch, FakeGpu(order=COPY_OUT_FIRST))
    with LLM(str(folder), device="cuda", enforce_eager=True, enable_fault_tolerance=False, **ARGUMENTS) as llm:
        (expected,) = generate(llm, REQUESTS[2:])
        for _ in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(GraphModelRunner, stage, failing_in_the_second_call(getattr(GraphModelRunner, stage)))
                with pytest.raises(StepError, match="bad luck"):
                    generate(llm, REQUESTS[2:])
        (again,) = generate(llm, REQUESTS[2:])
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def failing_in_the_second_call(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count()

    def call(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("bad luck")
        return function(*arguments, **more)

    return call


def test_a_gpu_that_is_too_small_is_refused_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeGpu(memory_bytes=1 << 12))
    with pytest.raises(OutOfMemoryError, match=r"the weights of a rank"):
        LLM(str(folder), device="cuda", **ARGUMENTS)
