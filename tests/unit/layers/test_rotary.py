"""Rotary embedding: frequencies and rotated heads as transformers has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from inflight.config.parse_architecture import parse_architecture
from inflight.layers.rotary import RotaryEmbedding, inverse_frequencies
from tests.unit.layers.contexts import layer_context

CPU = torch.device("cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
KINDS: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_theta": 1e6},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    YARN,
    {**YARN, "rope_theta": 1e6, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "truncate": False},
    {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {**YARN, "attention_factor": 1.25},
]


def config(head_dim: int, rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope},
        architectures=["LlamaForCausalLM"],
    )


@pytest.mark.parametrize("rope", KINDS)
@pytest.mark.parametrize("head_dim", [2, 20, 64, 128])
def test_frequencies(rope: dict[str, Any], head_dim: int) -> None:
    truth = LlamaRotaryEmbedding(config(head_dim, rope))
    ours = parse_architecture(config(head_dim, rope).to_dict()).layers[0].mixer.rope
    assert ours is not None
    torch.testing.assert_close(inverse_frequencies(ours, head_dim), truth.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(truth.attention_scaling)


@pytest.mark.parametrize("rope", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_rotated_heads(rope: dict[str, Any], dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", kernels)
    head_dim = 24
    heads = torch.randn(6, 5, head_dim).to(dtype)[:, :4]  # strided, as the fused projection leaves them
    positions = torch.tensor([0, 1, 2, 77, 4095, 131071], dtype=torch.int32)
    cos, sin = LlamaRotaryEmbedding(config(head_dim, rope))(heads, positions.unsqueeze(0))
    truth, _ = apply_rotary_pos_emb(heads.transpose(0, 1).unsqueeze(0), heads.transpose(0, 1).unsqueeze(0), cos, sin)
    architecture = parse_architecture(config(head_dim, rope).to_dict())
    rotation = RotaryEmbedding(architecture.layers[0].mixer.rope, head_dim, layer_context(dtype))(positions)
    ours = rotation.apply(heads, None)  # perhaps in place
    # float32: an angle of 131071 radians is known to 2^-7. bf16: transformers also rounds the second product.
    tolerance = {torch.float32: 0.02, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(ours, truth[0].transpose(0, 1), rtol=0, atol=tolerance)
    torch.testing.assert_close(
        ours[:4], truth[0].transpose(0, 1)[:4], rtol=0, atol=tolerance / 1e3 if dtype.itemsize == 4 else tolerance
    )
