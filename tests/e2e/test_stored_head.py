"""A file whose head contradicts its config.json: the text is that of transformers, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from inflight import LLM, SamplingParams
from tests.e2e.greedy_truth import Comparison
from tests.support.model_zoo import FALLBACK_CONFIGS, FAMILY_CONFIGS, VOCAB_SIZE, reference_model, write_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 14, 7, 3], [11, 12]]
MODELS = {
    "qwen3": FAMILY_CONFIGS["qwen3"][1],
    "lfm2": FAMILY_CONFIGS["lfm2"][0],  # tied by default
    "gemma3": FAMILY_CONFIGS["gemma3"][0],
    "gpt2": FALLBACK_CONFIGS["gpt2"][0],
    "falcon_mamba": FALLBACK_CONFIGS["falcon_mamba"][0],
}
EMBEDDINGS = {"gpt2": "transformer.wte.weight", "falcon_mamba": "backbone.embeddings.weight"}


def check(folder: Path, **arguments: Any) -> None:
    comparison, truth = Comparison(), reference_model(folder)
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
    with LLM(str(folder), **{**defaults, "kv_cache_memory_bytes": 1 << 24, **arguments}) as llm:
        for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
            comparison.add(truth, output.prompt_token_ids, output.outputs[0].token_ids)
    assert comparison.num_tokens == 24


def write(config: PreTrainedConfig, folder: Path, embedding: str, *, keeps_embedding: bool = True) -> Path:
    """A tied model, whose file has another head, or the head alone."""
    write_model(config, folder, seed=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = torch.randn(VOCAB_SIZE, tensors[embedding].shape[1], generator=torch.Generator().manual_seed(3))
    head = 0.15 * head if keeps_embedding else tensors.pop(embedding)
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("keeps_embedding", [True, False])
def test_another_head_is_used_and_a_head_alone_is_the_embedding(
    tmp_path: Path, family: str, keeps_embedding: bool
) -> None:
    embedding = EMBEDDINGS.get(family, "model.embed_tokens.weight")
    check(write(MODELS[family], tmp_path / "model", embedding, keeps_embedding=keeps_embedding))


@pytest.mark.parametrize("keeps_embedding", [True, False])
@pytest.mark.parametrize("model_impl", ["inflight", "transformers"])
@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_layouts(tmp_path: Path, model_impl: str, layout: str, keeps_embedding: bool) -> None:
    config = FAMILY_CONFIGS["gemma2"][0]  # tied by default
    folder = write(config, tmp_path / "model", "model.embed_tokens.weight", keeps_embedding=keeps_embedding)
    executor = "uni" if model_impl == "inflight" else "mp"
    check(folder, model_impl=model_impl, distributed_executor_backend=executor, **{layout: 2})
