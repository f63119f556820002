"""A dense MLP beside experts computes what transformers' own modules compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.layers.dense_and_moe import DenseAndMoe
from tests.unit.layers.zoo_layers import HIDDEN_SIZE, assert_equal, both_models, drawn


@pytest.mark.parametrize("kernels", ["off", "auto"])
@torch.inference_mode()
def test_the_results_are_added(kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", kernels)
    ours, theirs = both_models("gemma4", 3, tmp_path / "model")
    stream = drawn(19, HIDDEN_SIZE) * 3
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(layer.mlp, DenseAndMoe)
        dense = other.post_feedforward_layernorm_1(other.mlp(other.pre_feedforward_layernorm(stream)))
        _, weights, chosen = other.router(stream)
        experts = other.experts(other.pre_feedforward_layernorm_2(stream), chosen, weights)
        read = stream.clone()
        assert_equal(layer.mlp(read), dense + other.post_feedforward_layernorm_2(experts))
        assert torch.equal(read, stream), "the residual stream is changed by the decoder layer only"
