"""Greedy tokens on a GPU equal those of transformers on the same GPU: every family, with and without graphs, in all dtypes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, RequestOutput, SamplingParams
from inflight.errors import ConfigError
from tests.e2e.greedy_truth import Comparison
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, reference_model, write_model

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 48, 130, 333, 700)
OUTPUT_LENGTH = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LENGTH, ignore_eos=True)
ARGUMENTS: dict[str, Any] = {
    "device": DEVICE,
    "skip_tokenizer_init": True,
    "max_model_len": 800,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 26,
    "distributed_executor_backend": "uni",
}

# Their attention or recurrent layers have kernels for CPUs only.
CPU_FAMILIES = ("qwen3_5", "qwen3_next", "lfm2", "deepseek_v2", "deepseek_v3", "youtu", "minicpm3")
FAMILIES = [family for family in FAMILY_CONFIGS if family not in CPU_FAMILIES]

# Graphs where the plain one of each family is concerned; the odd ones show shapes and windows.
GRAPHS, EAGER, CHUNKED = {}, {"enforce_eager": True}, {"max_num_batched_tokens": 64}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *((family, 0, mode) for family in FAMILIES for mode in (GRAPHS, EAGER)),
    ("llama", 0, CHUNKED),  # prompts in pieces, beside decodes, within the graphs of mixed batches
    ("llama", 1, EAGER),  # one key head for 8, head_dim 20
    ("llama", 7, EAGER),  # head_dim 80
    ("mistral", 1, GRAPHS),  # a window of 7
    ("mistral", 2, EAGER),  # of 1
    ("qwen2", 2, GRAPHS),  # layers with a window and layers without
    ("qwen3", 1, EAGER),  # head_dim 32, tied
    ("qwen3", 5, EAGER),  # 9 heads, 3 a key head, head_dim 24
    ("qwen3", 4, CHUNKED),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("greedy")


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def case_id(value: object) -> str:
    return "-".join(value) or "graphs" if isinstance(value, dict) else str(value)


def generate_twice(folder: Path, **arguments: Any) -> list[RequestOutput]:
    """The second time from the prefix cache."""
    with LLM(str(folder), **{**ARGUMENTS, **arguments}) as llm:
        first = llm.generate(prompts(), GREEDY, use_tqdm=False)
        again = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert again[-1].num_cached_tokens >= 680
        llm.llm_engine.core.scheduler.check_integrity()
    return first + again


@pytest.mark.parametrize(("family", "index", "arguments"), CASES, ids=case_id)
def test_float32_tokens_are_those_of_transformers(
    root: Path, family: str, index: int, arguments: dict[str, Any]
) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], root / f"{family}-{index}", seed=index)
    truth, comparison = reference_model(folder).to(DEVICE), Comparison()
    for output in generate_twice(folder, dtype="float32", **arguments):
        comparison.add(truth, output.prompt_token_ids, output.outputs[0].token_ids)
    print(f"{family} {index}: {comparison}")
    assert comparison.num_tokens == 2 * len(PROMPT_LENGTHS) * OUTPUT_LENGTH
    assert comparison.num_ties <= 4


@pytest.mark.parametrize("family", CPU_FAMILIES)
def test_a_family_without_kernels_for_gpus_is_refused(root: Path, family: str) -> None:
    folder = write_model(FAMILY_CONFIGS[family][0], root / f"{family}-refused", seed=0)
    with pytest.raises(ConfigError, match="on CPUs only so far"):
        LLM(str(folder), **ARGUMENTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_few_bits_are_as_good_as_those_of_transformers(root: Path, family: str, dtype: torch.dtype) -> None:
    """A token may be another than the best in float32, by as much as transformers' logits in the dtype are away from these."""
    folder = write_model(FAMILY_CONFIGS[family][0], root / f"{family}-{dtype}", seed=0, dtype=dtype)
    exact, rounded = reference_model(folder).to(DEVICE), reference_model(folder, dtype=dtype).to(DEVICE)
    tokens = torch.tensor([prompts()[-1]], device=DEVICE)
    with torch.inference_mode():
        error = float((exact(tokens).logits - rounded(tokens).logits.float()).abs().max())
    comparison = Comparison(margin=3 * error)  # two logits, and rows that are worse than these
    for output in generate_twice(folder, dtype=str(dtype).removeprefix("torch.")):
        comparison.add(exact, output.prompt_token_ids, output.outputs[0].token_ids)
    print(f"{family} {dtype}: {comparison}")
    assert comparison.num_ties < comparison.num_tokens / 10
