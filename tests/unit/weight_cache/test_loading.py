"""Models of every family whose weights are mapped compute what they compute with weights that were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.config.engine import QuantizationConfig
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.linear import Linear
from tests.conftest import FULL
from tests.support.cached_weights import load_cached, refuse_to_fill, use_cache
from tests.support.full_context_attention import load, run_prompt
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

PROMPT = torch.arange(9)
CASES = [(name, index) for name, configs in FAMILY_CONFIGS.items() for index in range(len(configs) if FULL else 1)]


@pytest.mark.parametrize(("family", "index"), CASES)
def test_a_mapped_model_computes_the_same(
    family: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = use_cache(tmp_path / "cache", monkeypatch)
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=1)
    truth = run_prompt(load(folder), PROMPT)
    assert torch.equal(run_prompt(load_cached(folder), PROMPT), truth)
    assert len(list(cache.glob("*.weights"))) == 1
    refuse_to_fill(monkeypatch)
    mapped = load_cached(folder)
    assert mapped.mapped_bytes
    assert torch.equal(run_prompt(mapped, PROMPT), truth)


@pytest.mark.parametrize("layers", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe", "deepseek_v2"])
def test_quantized_weights(layers: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path / "cache", monkeypatch)
    folder = write_model(FAMILY_CONFIGS[family][0], tmp_path / "model", seed=1)
    quantization = QuantizationConfig(layers=layers, head="int8", group_size=32)
    truth = run_prompt(load(folder, quantization), PROMPT)
    load_cached(folder, quantization)
    refuse_to_fill(monkeypatch)
    assert torch.equal(run_prompt(load_cached(folder, quantization), PROMPT), truth)


def test_each_rank_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(TensorParallelGroup):
        """One of two ranks, alone: its sums are its own parts."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank
            self.size = 2

    cache = use_cache(tmp_path / "cache", monkeypatch)
    folder = write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path / "model", seed=1)
    weights = [[_product(load_cached(folder, tp=Half(rank))) for rank in range(2)] for _ in range(2)]
    assert len(list(cache.glob("*.weights"))) == 2
    assert not torch.equal(weights[0][0], weights[0][1])
    for first, second in zip(*weights, strict=True):
        assert torch.equal(first, second)


def _product(model: torch.nn.Module) -> torch.Tensor:
    linear = next(module for module in model.modules() if isinstance(module, Linear))
    packed: torch.Tensor = linear.multiply.packed  # type: ignore[attr-defined]
    return packed


def test_what_the_cache_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights, dtypes, quantizations and instruction sets never share a file."""
    cache = use_cache(tmp_path / "cache", monkeypatch)
    folder = write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path / "model", seed=1)
    first = run_prompt(load_cached(folder), PROMPT)
    load_cached(folder, dtype="bfloat16")
    load_cached(folder, QuantizationConfig(layers="int8"))
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "avx2")
    load_cached(folder)
    monkeypatch.delenv("INFLIGHT_CPU_KERNELS")
    assert len(list(cache.glob("*.weights"))) == 4
    write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path / "model", seed=2)
    assert not torch.equal(run_prompt(load_cached(folder), PROMPT), first)
    assert len(list(cache.glob("*.weights"))) == 5
