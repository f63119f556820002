"""A router whose logits are not finite for one token: the requests with this token fail, and no other request sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import LLM, RequestOutput, SamplingParams
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

BAD_TOKEN = 7
FIRST_OWN = 62  # the last two channels of 64 belong to BAD_TOKEN
LARGE = 3e38  # times a number above 1.2 it is infinite
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# family, arguments, whether the case runs always
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("qwen3_moe", {}, True),
    ("deepseek_v3", {}, True),  # sigmoid, groups and a bias for the choice
    ("gpt_oss", {"quantization": "int8"}, True),
    ("qwen3_moe", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, True),
    ("qwen3_moe", TWO_RANKS, False),
    ("mixtral", {"dtype": "bfloat16"}, False),
    ("qwen3_moe", {"kv_cache_dtype": "int8"}, False),
    ("qwen3_moe", {**TWO_RANKS, "enable_expert_parallel": True}, False),
    ("qwen3_moe", {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, False),
]


def write_spoilt(folder: Path, family: str) -> None:
    """Two channels of the residual stream are zero, but for BAD_TOKEN. The routers multiply them by large numbers."""
    config = next(
        each for each in FAMILY_CONFIGS[family] if getattr(each, "first_k_dense_replace", 0) < each.num_hidden_layers
    )
    write_model(config, folder, seed=3)
    file = folder / "model.safetensors"
    weights = load_file(file)
    num_routers = 0
    for name, weight in weights.items():
        if name.endswith("norm.weight") and len(weight) == 64:
            weight[FIRST_OWN:] = 1
        elif name.endswith(("o_proj.weight", "o_proj.bias", "w2.weight", "down_proj.weight")):
            weight[FIRST_OWN:] = 0
        elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):
            rows = weight if family == "gpt_oss" else weight.transpose(-1, -2)  # [experts, size, hidden size], a view
            rows[..., FIRST_OWN:] = 0
        elif name.endswith((".gate.weight", ".router.weight")):
            weight[:, FIRST_OWN] = -LARGE
            weight[:, FIRST_OWN + 1] = LARGE
            num_routers += 1
        elif name.endswith("embed_tokens.weight"):
            weight[:, FIRST_OWN:] = 0
            weight[BAD_TOKEN, FIRST_OWN:] = 100
        elif name == "lm_head.weight":
            weight[BAD_TOKEN] = weight[BAD_TOKEN - 1]  # of equal logits the first wins, so the token is never drawn
    assert num_routers and "lm_head.weight" in weights
    save_file(weights, file, {"format": "pt"})


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """(prompts without the token, prompts with it). Steps have at most 48 tokens, so some prompts are cut into pieces."""
    generator = torch.Generator().manual_seed(3)

    def draw(size: int) -> list[int]:
        return torch.randint(BAD_TOKEN + 1, VOCAB_SIZE, (size,), generator=generator).tolist()

    good = [draw(size) for size in (1, 5, 40, 90, 2, 30)]
    return good, [
        [*draw(3), BAD_TOKEN, *draw(2)],
        [*draw(60), BAD_TOKEN, *draw(20)],
        [BAD_TOKEN],
        [*draw(70), BAD_TOKEN],
    ]


def numbers(output: RequestOutput) -> tuple[Any, ...]:
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs, completion.finish_reason


@pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")
@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        pytest.param(family, arguments, marks=() if always else pytest.mark.full, id="-".join((family, *arguments)))
        for family, arguments, always in CASES
    ],
)
def test_only_the_requests_with_the_token_fail(tmp_path: Path, family: str, arguments: dict[str, Any]) -> None:
    write_spoilt(tmp_path / "model", family)
    given: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 20,
    }
    given |= {"skip_tokenizer_init": True, "distributed_executor_backend": "uni", "dtype": "float32", "num_threads": 1}
    good, bad = prompts()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    with LLM(str(tmp_path / "model"), **{**given, **arguments}) as llm:
        wanted = [numbers(each) for each in llm.generate(good, params, use_tqdm=False)]
        for _ in range(2):  # in the second round, blocks of the failed requests are used again
            llm.reset_prefix_cache()
            outputs = llm.generate([*bad, *good], params, use_tqdm=False)
            failed = outputs[: len(bad)]
            assert [each.outputs[0].finish_reason for each in failed] == ["error"] * len(bad)
            assert [str(each.error) for each in failed if "not finite" not in str(each.error)] == []
            assert [numbers(each) for each in outputs[len(bad) :]] == wanted
    assert all(each[2] == "length" for each in wanted)
