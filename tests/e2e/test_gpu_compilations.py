"""While an engine serves, a GPU compiles no kernel: each one was launched at the start, with the same specialization.

A compilation takes up to some seconds, and every stream waits for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.kernels.triton.attention_mixed import attention_mixed_kernel
from tests.e2e.test_gpu_engine import ARGUMENTS
from tests.support.fake_gpu import COPY_OUT_FIRST, FakeGpu, install
from tests.support.gpu_layers import use_gpu_layers
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.triton_launches import Launches

PROMPT = [5 + i % 40 for i in range(40)]
LENGTHS = (1, 2, 3, 15, 16, 17, 33)  # `max_num_batched_tokens` is 16
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 1, "top_k": 5, "min_p": 0.1, "n": 2},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}, "min_tokens": 2},
    {"temperature": 0.0, "allowed_token_ids": [1, 2, 3]},
]
DRAFTS = {"speculative_config": {"method": "ngram"}}


def new_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch, **engine_args: Any) -> set[str]:
    """The kernels that the engine's requests launch with a specialization that its start did not have."""
    install(monkeypatch, FakeGpu(order=COPY_OUT_FIRST))
    use_gpu_layers(monkeypatch)
    launches = Launches(monkeypatch)
    with LLM(str(folder), device="cuda", **ARGUMENTS, **engine_args) as llm:
        at_start = set(launches.seen)
        assert at_start
        for length in LENGTHS:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            llm.generate([{"prompt_token_ids": PROMPT[:length]}], params, use_tqdm=False)
        prompts = [{"prompt_token_ids": PROMPT[i:]} for i in range(len(FIELDS))]
        llm.generate(
            prompts, [SamplingParams(max_tokens=4, ignore_eos=True, **each) for each in FIELDS], use_tqdm=False
        )
    return {name for name, _ in launches.seen - at_start}


@pytest.mark.parametrize(
    ("family", "engine_args"),
    [
        ("llama", {"enforce_eager": True}),
        pytest.param("llama", {"cuda_graph_max_tokens": 8}, marks=pytest.mark.full_gpu),
        pytest.param("llama", {"cuda_graph_max_tokens": 0}, marks=pytest.mark.full_gpu),
        pytest.param("llama", DRAFTS, marks=pytest.mark.full_gpu),
        pytest.param("qwen2_moe", {"cuda_graph_max_tokens": 4}, marks=pytest.mark.full_gpu),
        pytest.param("gemma2", {"cuda_graph_max_tokens": 4}, marks=pytest.mark.full_gpu),
        pytest.param("gpt_oss", {"enforce_eager": True}, marks=pytest.mark.full_gpu),
        pytest.param("gpt_oss", DRAFTS, marks=pytest.mark.full_gpu),
    ],
)
def test_no_request_compiles_a_kernel(
    family: str, engine_args: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(FAMILY_CONFIGS[family][0], tmp_path / "model", seed=2)
    assert new_kernels(folder, monkeypatch, **engine_args) == set()


def test_a_number_of_rows_that_is_compiled_in_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [name for name in attention_mixed_kernel.kwargs["do_not_specialize"] if name != "num_rows"]
    monkeypatch.setitem(attention_mixed_kernel.kwargs, "do_not_specialize", free)
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=2)
    assert new_kernels(folder, monkeypatch, **DRAFTS) == {"attention_mixed_kernel"}
