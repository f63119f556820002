"""Models that are loaded with a cache of packed weights, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader import loader
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM
from inflight.weight_cache import identity
from inflight.weight_cache.background import BackgroundWork
from inflight.weight_cache.place import cache_path
from tests.support.full_context_attention import FullContextAttention


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packed weights are kept below `folder` from now on, also if the model was written a moment ago. Returns where."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("INFLIGHT_WEIGHT_CACHE", "on")
    monkeypatch.setattr(identity, "SETTLED_SECONDS", -1e9)
    path = cache_path()
    assert path is not None
    return path


def refuse_to_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a model that is loaded from its checkpoint fails."""

    def fill(*_: object) -> None:
        raise AssertionError("a unit was filled")

    monkeypatch.setattr(loader, "_allocate_and_fill", fill)


def load_cached(
    folder: Path,
    quantization: QuantizationConfig | None = None,
    *,
    tp: TensorParallelGroup | None = None,
    dtype: str = "float32",
    limit_bytes: int = 1 << 30,
) -> CausalLM:
    """Loads a model, and waits until its packed weights are written."""
    config = ModelConfig(
        folder=folder,
        name="x",
        architecture=parse_architecture(read_model_config(folder)),
        dtype=dtype,
        max_model_len=64,
        load_format="gguf" if folder.suffix == ".gguf" else "safetensors",
        seed=0,
        fingerprint="",
        quantization=quantization or QuantizationConfig(),
        weight_cache_bytes=limit_bytes,
    )
    backend: Any = FullContextAttention()  # Any: a stand-in
    later = BackgroundWork()
    model = load_model(config, device=torch.device("cpu"), backend=backend, tp=tp or TensorParallelGroup(), later=later)
    later.start(lambda: True)
    later.close(600)
    return model
