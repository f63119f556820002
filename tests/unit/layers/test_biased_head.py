"""A head with a bias: the logits of each rank have the bias of its part of the vocabulary."""

from __future__ import annotations

from pathlib import Path

import torch

from inflight.layers.biased_head import BiasedHead
from inflight.models.decoder import DecoderForCausalLM
from tests.support.full_context_attention import load
from tests.support.model_zoo import FAMILY_CONFIGS, reference_model, write_model
from tests.unit.layers.zoo_layers import HIDDEN_SIZE, assert_equal, drawn


@torch.inference_mode()
def test_the_bias_is_added(tmp_path: Path) -> None:
    folder = write_model(FAMILY_CONFIGS["phimoe"][0], tmp_path / "model", seed=0)
    ours, theirs = load(folder), reference_model(folder)
    assert isinstance(ours, DecoderForCausalLM) and isinstance(ours.lm_head, BiasedHead)
    hidden = drawn(5, HIDDEN_SIZE)
    assert_equal(ours.compute_logits(hidden), theirs.lm_head(hidden))
    assert theirs.lm_head.bias.abs().max() > 0.1
