"""Layers with experts compute what transformers' own modules compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.config.experts import MoeSpec
from inflight.kernels.cpu.library import load_kernels
from inflight.layers.linear import Linear
from inflight.layers.moe import FusedMoE
from tests.support.model_zoo import FAMILY_CONFIGS
from tests.unit.layers.zoo_layers import assert_equal, both_models, drawn

NUM_TOKENS = 29
MODULES = ("mlp", "block_sparse_moe", "feed_forward")
CASES = [
    (family, index)
    for family in (
        "qwen3_moe",
        "qwen2_moe",
        "mixtral",
        "olmoe",
        "granitemoe",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "glm4_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "lfm2_moe",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "phimoe",
    )
    for index, config in enumerate(FAMILY_CONFIGS[family])
    if getattr(config, "first_k_dense_replace", 0) < config.num_hidden_layers and getattr(config, "num_experts", 1)
]


@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize(("family", "index"), CASES)
@torch.inference_mode()
def test_the_layer_is_that_of_transformers(
    family: str, index: int, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", kernels)
    ours, theirs = both_models(family, index, tmp_path / "model")
    num_layers = 0
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        module = next(child for name, child in other.named_children() if name in MODULES)
        hidden = drawn(NUM_TOKENS, FAMILY_CONFIGS[family][index].hidden_size) * (6 if family == "gpt_oss" else 1)
        found = layer.mlp(hidden)  # gpt-oss: beyond the limits of its gate
        expected = module(hidden[None])[0]
        assert_equal(found, expected.view(found.shape))
        if isinstance(layer.mlp, FusedMoE):
            num_layers += 1
            fits_kernel = kernels == "auto" and (family, index) not in (("qwen3_moe", 4), ("gpt_oss", 2))
            assert (layer.mlp.kernel is not None) is (fits_kernel and load_kernels() is not None)
            alone = torch.cat([layer.mlp(hidden[i : i + 1]) for i in range(NUM_TOKENS)])
            products = [part for part in layer.mlp.modules() if isinstance(part, Linear)]
            if all(part.method.is_batch_invariant(part.in_features) for part in products):
                assert torch.equal(alone, found), "a token's result depends on the others"
    assert num_layers > 0


@torch.inference_mode()
def test_experts_are_loaded_group_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than one group has weights that are not packed yet, and the groups change no result."""
    whole, _ = both_models("qwen3_moe", 0, tmp_path / "whole")
    monkeypatch.setattr("inflight.layers.moe._GROUP_BYTES", 3 * 3 * 64 * 32 * 4)  # three experts
    held: list[int] = []

    def finish(group: torch.nn.Module) -> None:
        held.append(sum(not weight.is_meta for weight in group.parameters()))
        for child in group.children():
            child.finish_loading()  # type: ignore[operator]

    monkeypatch.setattr("inflight.layers.moe.ExpertGroup.finish_loading", finish)
    ours, _ = both_models("qwen3_moe", 0, tmp_path / "model")
    assert held == [6, 6, 4] * 2
    hidden = drawn(5, 64)
    for layer, other in zip(ours.layers, whole.layers, strict=True):
        assert isinstance(layer.mlp, FusedMoE) and isinstance(layer.mlp.spec, MoeSpec)
        assert [len(list(group.children())) for group in layer.mlp.groups] == [3, 3, 2]
        assert torch.equal(layer.mlp(hidden), other.mlp(hidden))
