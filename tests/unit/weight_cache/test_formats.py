"""Weights of every stored format that are mapped compute what they compute after they were loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inflight.config.engine import QuantizationConfig
from tests.support import gguf_experts, gguf_models
from tests.support.cached_weights import load_cached, refuse_to_fill, use_cache
from tests.support.full_context_attention import run_prompt
from tests.support.mxfp4_checkpoints import write_mxfp4
from tests.support.quantized_checkpoints import awq, gptq
from tests.unit.model_loader import test_float8_source as float8
from tests.unit.model_loader import test_packed_checkpoint as packed

PROMPT = torch.arange(9)
# name -> writes a model below a folder; returns its folder or file
FORMATS: dict[str, Callable[[Path], Path]] = {
    "gptq": lambda folder: packed.write_pair(folder, packed.GPTQ_CONFIG, gptq, bits=4, group_size=32)[1],
    "awq": lambda folder: packed.write_pair(folder, packed.AWQ_CONFIG, awq, bits=4, group_size=32)[1],
    "fp8": lambda folder: float8.write_pair(folder, "blocks")[1],
    "fp8 experts": lambda folder: float8.write_pair(folder, "fbgemm", "qwen3_moe")[1],
    "mxfp4 experts": lambda folder: write_mxfp4(folder)[1],
    "gguf": lambda folder: gguf_models.write_pair(folder, "qwen3")[1],
    "gguf with experts": lambda folder: gguf_experts.write_mixture(folder, "qwen3moe")[1],
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_mapped_model_computes_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path / "cache", monkeypatch)
    (tmp_path / "model").mkdir()
    path = FORMATS[name](tmp_path / "model")
    quantizations = [None, QuantizationConfig(layers="int8", head="int8")] if name.startswith("fp8") else [None]
    for quantization in quantizations:
        truth = run_prompt(load_cached(path, quantization, limit_bytes=0), PROMPT)
        load_cached(path, quantization)
        with monkeypatch.context() as patched:
            refuse_to_fill(patched)
            mapped = load_cached(path, quantization)
        assert mapped.mapped_bytes
        assert torch.equal(run_prompt(mapped, PROMPT), truth)
