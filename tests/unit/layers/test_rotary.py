"""Rotary embedding: frequencies and rotated heads as transformers has them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from inflight.attention.selector import get_backend
from inflight.config.mixers import RopeConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.layers.rope_frequencies import inverse_frequencies
from inflight.layers.rotary import NUM_AHEAD, RotaryEmbedding
from inflight.layers.sharding import repeat_order, row_order
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
    {**YARN, "rope_theta": 10.0},  # no pair turns less than once: the range of pairs is cut
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


@pytest.mark.parametrize(
    ("rope", "order"),
    [
        (None, None),
        (RopeConfig(), None),
        (RopeConfig(rotary_dim=8), None),
        (RopeConfig(kind="proportional", rotary_dim=4), None),  # its pairs are (i, i + head_dim / 2) already
        (RopeConfig(interleaved=True), [0, 2, 4, 6, 1, 3, 5, 7]),
        (RopeConfig(rotary_dim=4), [0, 1, 4, 5, 2, 3, 6, 7]),
        (RopeConfig(rotary_dim=4, interleaved=True), [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_the_order_in_which_pairs_are_half_a_head_apart(rope: RopeConfig | None, order: list[int] | None) -> None:
    found = row_order(rope, 8)
    assert (None if found is None else found.tolist()) == order
    if found is not None:
        assert repeat_order(found, 16).tolist() == [*found.tolist(), *(found + 8).tolist()]


@pytest.mark.parametrize(("kind", "dim"), [("proportional", 16), ("default", 4)])
def test_a_part_of_each_head_is_rotated(kind: str, dim: int) -> None:
    """The frequencies of "proportional" are those of a head that is rotated as a whole."""
    rope = RopeConfig(kind=kind, rotary_dim=4, theta=100.0, factor=2.0)
    found = RotaryEmbedding(rope, 16, layer_context(torch.float32)).frequencies
    factor = 2.0 if kind == "proportional" else 1.0
    rotated = [100.0 ** (-2 * i / dim) / factor for i in range(2)]
    torch.testing.assert_close(found, torch.tensor([*rotated, *[0.0] * 6] * 2))


def test_without_rotation_nothing_changes() -> None:
    heads = torch.randn(3, 2, 8)
    rotation = RotaryEmbedding(None, 8, layer_context(torch.float32))(torch.tensor([0, 5, 900]))
    torch.testing.assert_close(rotation.apply(heads.clone(), None), heads)


def test_queries_beyond_the_original_length_are_scaled() -> None:
    rope = RopeConfig(query_beta=0.5, original_max_position_embeddings=16)
    scale = RotaryEmbedding(rope, 8, layer_context(torch.float32))(torch.tensor([0, 15, 16, 47, 48])).query_scale
    assert scale is not None
    wanted = [1 + 0.5 * math.log(1 + periods) for periods in (0, 0, 1, 2, 3)]
    torch.testing.assert_close(scale, torch.tensor(wanted)[:, None])


def test_longrope_divides_each_frequency_by_its_factor() -> None:
    rope = RopeConfig(kind="longrope", theta=100.0, factors=(1.0, 4.0))
    torch.testing.assert_close(inverse_frequencies(rope, 4), torch.tensor([1.0, 0.1 / 4]))


def test_yarn_with_an_empty_range_of_correction_is_finite() -> None:
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=4, beta_fast=2.0, beta_slow=1.0)
    assert inverse_frequencies(rope, 8).isfinite().all()


@pytest.mark.parametrize("rope", [None, RopeConfig(theta=1e6), RopeConfig(query_beta=0.5, rotary_dim=4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_has_the_rotation_that_it_has_among_others(rope: RopeConfig | None, dtype: torch.dtype) -> None:
    """Positions in order, as one request has them, and those of two requests that take turns, at the ends of what is kept."""
    backend = get_backend("cpu", [8], 16, dtype, dtype)  # the kernels, if they are installed
    rotary = RotaryEmbedding(rope, 8, dataclasses.replace(layer_context(dtype), backend=backend))
    positions = [*range(70), 5, 900, 6, 901, 900 + NUM_AHEAD - 1, 900 + NUM_AHEAD, 899, 131071]
    among_others = rotary(torch.tensor(positions, dtype=torch.int32))
    for row, position in enumerate(positions):
        alone = rotary(torch.tensor([position], dtype=torch.int32))
        assert len(alone.tensors) == len(among_others.tensors) and alone.changes_nothing == (rope is None)
        for one, all_of_them in zip(alone.tensors, among_others.tensors, strict=True):
            assert torch.equal(one, all_of_them[row : row + 1]) and one.is_contiguous(), position
