"""Layers of small models that transformers has written, and the same layers of transformers: the truth for tests of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.models.decoder import DecoderForCausalLM
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.full_context_attention import load
from tests.support.model_zoo import FAMILY_CONFIGS, reference_model, write_model

HIDDEN_SIZE = 64


def both_models(family: str, index: int, folder: Path) -> tuple[DecoderForCausalLM, Any]:
    """Our model and that of transformers, with the same random weights, in float32."""
    write_model(FAMILY_CONFIGS[family][index], folder, seed=index)
    ours = load(folder)
    assert isinstance(ours, DecoderForCausalLM)
    theirs: Any = reference_model(folder)  # Any: each family has other attributes
    return ours, theirs.model


def drawn(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """Up to the rounding of float32."""
    assert ours.shape == theirs.shape
    assert theirs.abs().mean() > 1e-3, "results that are all near zero would agree whatever a layer does"
    assert relative_difference(ours, theirs) < FLOAT32_TOLERANCE
