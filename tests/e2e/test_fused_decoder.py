"""All layers in one call of the kernels: the same tokens and log-probabilities, bit for bit, as layer after layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, RequestOutput, SamplingParams
from inflight.models.fused_decoder import FusedDecoder
from tests.instruction_sets import INSTRUCTION_SETS_HERE
from tests.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")

# of each family, with a head_dim that the attention kernel takes: plain, with all biases, with windows, with QK-norm
MODELS = [("llama", 0), ("llama", 6), ("mistral", 1), ("qwen2", 2), ("qwen3", 1), ("qwen3", 4)]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (1, 5, 40, 90)]


def run(folder: Path, **arguments: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    given = {"max_model_len": 128, "max_num_batched_tokens": 48, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22}
    given |= {"skip_tokenizer_init": True, "distributed_executor_backend": "uni", "dtype": "bfloat16", "num_threads": 1}
    with LLM(str(folder), **{**given, **arguments}) as llm:
        return llm.generate(prompts(), params, use_tqdm=False)


def numbers(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs) for out in outputs]


@pytest.mark.parametrize(("family", "index"), MODELS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dtype": "float32"},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"quantization": "int4", "quantization_group_size": 32, "head_quantization": "none"},
        {"pipeline_parallel_size": 2},
    ],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()) or "bfloat16",
)
def test_one_call_is_layer_after_layer(
    family: str, index: int, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=1)
    calls: list[int | None] = []
    fused = FusedDecoder.__call__

    def counted(self: FusedDecoder, *arguments: Any) -> Any:
        calls.append(arguments[-1])
        return fused(self, *arguments)

    monkeypatch.setattr(FusedDecoder, "__call__", counted)
    together = numbers(run(folder, **arguments))
    assert len(calls) > 5, "the layers were not fused"
    calls.clear()
    monkeypatch.setattr(FusedDecoder, "can_fuse", staticmethod(lambda layers: False))
    assert numbers(run(folder, **arguments)) == together
    assert not calls


def test_ranks_that_share_layers_take_them_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("fused, though the ranks' sums have to be added up between the layers")

    monkeypatch.setattr(FusedDecoder, "__call__", refuse)
    assert len(run(folder, tensor_parallel_size=2)) == 4
