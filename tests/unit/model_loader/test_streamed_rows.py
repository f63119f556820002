"""A model whose weights are read some rows at a time computes the same logits, bit for bit, in every file format, with and
without the C++ kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.config.engine import QuantizationConfig
from inflight.kernels import weight_rows
from inflight.layers.weights import WeightSlot
from inflight.model_loader import streamed_rows
from inflight.model_loader.streamed_rows import is_streamed
from inflight.model_loader.weight_source import StoredTensor
from tests.conftest import FULL
from tests.support.full_context_attention import load, run_prompt
from tests.unit.model_loader.test_damaged_weights import CHECKPOINTS

PROMPT = torch.arange(9)
KINDS = CHECKPOINTS if FULL else ("llama", "gpt_oss", "gptq", "pack-quantized", "fp8 in blocks", "gguf")


def stream_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weight_rows, streamed_rows):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(weight_rows, "AT_ONCE", 1)  # 64 rows


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_the_same(kind: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", kernels)
    checkpoint = CHECKPOINTS[kind](tmp_path / "model")
    checkpoint.write(checkpoint.tensors)
    quantizations = (None, "int8", "int4") if kernels == "auto" else (None,)
    configs = [QuantizationConfig(layers=each, head=each, group_size=32) for each in quantizations]
    wanted = [run_prompt(load(checkpoint.path, config), PROMPT) for config in configs]
    stream_all(monkeypatch)
    for config, logits in zip(configs, wanted, strict=True):
        assert run_prompt(load(checkpoint.path, config), PROMPT).equal(logits), config


def test_what_is_kept_for_a_conversion_is_read_as_a_whole() -> None:
    """As transformers' code does with experts: such a slot has no memory."""
    shape = (1 << 14, 1 << 13)
    stored = StoredTensor(Path("x"), "x", shape, "BF16")
    for device, is_large in (("meta", False), ("cpu", True)):
        destination = torch.empty(shape, dtype=torch.bfloat16, device=device)
        slot = WeightSlot(shape=shape, destination=destination, accept=lambda part: True)
        assert is_streamed(slot, stored) is is_large
