"""Whole models with the layers of a GPU, in Triton's interpreter, against the same models on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.config.engine import QuantizationConfig
from inflight.errors import ConfigError
from inflight.layers.gpu_linear import GpuLinear
from inflight.layers.linear import Linear
from inflight.layers.moe import FusedMoE
from inflight.layers.vocab import LogitsHead
from inflight.layers.weights import Loadable
from tests.support.full_context_attention import load, run_prompt
from tests.support.gpu_layers import use_gpu_layers
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

PROMPT = torch.arange(12)
# family -> one whose layers call the same functions
ALIKE = {
    "mistral": "llama",
    "ministral": "llama",
    "olmo3": "olmo2",
    "glm": "glm4",
    "gemma3": "gemma4",
    "qwen3_next": "qwen3_5_moe",
    "lfm2": "lfm2_moe",
    "deepseek_v2": "deepseek_v3",
    "youtu": "deepseek_v3",
    "minicpm3": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "glm4_moe": "qwen2_moe",
    "ernie4_5_moe": "qwen2_moe",
    "hunyuan_v1_moe": "qwen2_moe",
    "phimoe": "qwen2_moe",
    "mixtral": "qwen2_moe",
    "olmoe": "qwen2_moe",
    "granitemoe": "qwen2_moe",
    "qwen3_moe": "qwen2_moe",
    "granite": "llama",
    "qwen3_5": "qwen3_5_moe",
}
FAMILIES = [
    pytest.param(family, marks=pytest.mark.full_gpu) if family in ALIKE else family for family in sorted(FAMILY_CONFIGS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["llama"][0], tmp_path_factory.mktemp("model") / "whole", seed=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(FAMILY_CONFIGS[family][0], tmp_path / "model", seed=1)
    truth = run_prompt(load(folder), PROMPT)
    use_gpu_layers(monkeypatch)
    model = load(folder)
    assert model.tune(64) == [], "in float32 the library computes alone"
    torch.testing.assert_close(run_prompt(model, PROMPT), truth, rtol=1e-4, atol=1e-4)
    hidden, out = torch.randn(3, 64), torch.full((3, VOCAB_SIZE), torch.nan)
    assert model.compute_logits(hidden, out) is out
    assert torch.equal(out, model.compute_logits(hidden))


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.06), ("int4", 0.5)])
def test_weights_of_fewer_bits(quantization: str, most: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = run_prompt(load(folder), PROMPT)
    use_gpu_layers(monkeypatch)
    model = load(folder, QuantizationConfig(layers=quantization, head="int8", group_size=32))
    by_library = run_prompt(model, PROMPT)
    assert 0.001 < (by_library - truth).norm() / truth.norm() < most
    choices = model.tune(len(PROMPT))
    assert {choice.num_rows for choice in choices} == {1, 2, 4, 8, 16}
    assert not any(choice.way == "library" for choice in choices)
    torch.testing.assert_close(run_prompt(model, PROMPT), by_library, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("family", "quantization", "most"), [("gpt_oss", "int8", 0.25), ("qwen2_moe", "int4", 0.6)])
def test_experts_of_fewer_bits(
    family: str, quantization: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two experts have nearly equal scores, other weights may choose the other one, so the bounds are wide. The tests of
    the kernels have narrow ones."""
    folder = write_model(FAMILY_CONFIGS[family][0], tmp_path / "model", seed=1)
    truth = run_prompt(load(folder), PROMPT)
    use_gpu_layers(monkeypatch)
    model = load(folder, QuantizationConfig(layers=quantization, group_size=32))
    assert 0.001 < (run_prompt(model, PROMPT) - truth).norm() / truth.norm() < most
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    assert layers and all(layer.together is not None for layer in layers)
    method = layers[0].linear  # it measures other layers, and keeps no experts one by one
    assert isinstance(method, GpuLinear)
    left = [layer for layer in model.modules() if isinstance(layer, Linear) and hasattr(layer, "multiply")]
    assert {*map(id, method._layers)} == {id(layer.multiply) for layer in left if layer.method is method}


def test_batch_invariance_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu_layers(monkeypatch)
    with pytest.raises(ConfigError, match=r"cannot be kept here: its linear layers"):
        load(folder, batch_invariant=True)


def test_memory_is_allocated_a_block_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a block is loaded, those before have given their plain weights back, and those behind have none yet."""
    allocate, seen = Loadable.allocate, []

    def watched(unit: Loadable, device: torch.device) -> None:
        plain = [module.weight for module in unit.modules() if isinstance(module, Linear)]
        assert all(weight.is_meta for weight in plain)
        assert not any(hasattr(module, "weight") for module in seen), "the final form took its place"
        allocate(unit, device)
        seen.extend(module for module in unit.modules() if isinstance(module, Linear | LogitsHead))

    monkeypatch.setattr(Loadable, "allocate", watched)
    use_gpu_layers(monkeypatch)
    load(folder, QuantizationConfig(layers="int8"))
    assert len(seen) == 2 * 4 + 1
