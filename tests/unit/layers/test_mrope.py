"""Rotary embedding with three positions for each token, as in transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from inflight.config.mixers import RopeConfig
from inflight.layers.mrope import make_rotary
from tests.unit.layers.contexts import layer_context

KINDS = {"qwen2_5_vl_text": (Qwen2_5_VLRotaryEmbedding, False), "qwen3_vl_text": (Qwen3VLTextRotaryEmbedding, True)}
POSITIONS = torch.tensor([[0, 1, 2, 2, 2, 2, 7, 90_000], [0, 1, 2, 2, 3, 3, 7, 90_001], [0, 1, 2, 3, 2, 3, 7, 90_004]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "sections"), [(128, (24, 20, 20)), (128, (16, 24, 24)), (16, (2, 3, 3)), (8, (4, 0, 0))]
)
@pytest.mark.parametrize("family", KINDS)
def test_three_positions(family: str, head_dim: int, sections: tuple[int, int, int], dtype: torch.dtype) -> None:
    make, is_interleaved = KINDS[family]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)}
    config = AutoConfig.for_model(family, head_dim=head_dim, hidden_size=2 * head_dim, num_attention_heads=2)
    config.rope_parameters = rope
    cos, sin = make(config)(torch.zeros(1, dtype=dtype), POSITIONS[:, None])
    ours = make_rotary(
        RopeConfig(theta=1e6, mrope_section=sections, mrope_interleaved=is_interleaved), head_dim, layer_context(dtype)
    )
    found = ours(POSITIONS)
    half = head_dim // 2
    rounding = torch.finfo(dtype).eps  # both are computed in float32, to one unit in the last place
    torch.testing.assert_close(found.cos, cos[0], rtol=0, atol=rounding)
    torch.testing.assert_close(
        found.sin, torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=1), rtol=0, atol=rounding
    )


def test_a_text_has_the_usual_rotation() -> None:
    rope = RopeConfig(mrope_section=(2, 3, 3))
    ours, usual = (
        make_rotary(each, 16, layer_context(torch.float32)) for each in (rope, replace(rope, mrope_section=()))
    )
    positions = torch.arange(50)
    expected = usual(positions)
    for given in (positions, positions.expand(3, -1)):
        assert torch.equal(ours(given).cos, expected.cos)
        assert torch.equal(ours(given).sin, expected.sin)


def test_only_a_part_of_a_head_is_rotated() -> None:
    rope = RopeConfig(rotary_dim=8, mrope_section=(2, 1, 1), mrope_interleaved=True)
    found = make_rotary(rope, 32, layer_context(torch.float32))(POSITIONS)
    part = make_rotary(replace(rope, rotary_dim=None), 8, layer_context(torch.float32))(POSITIONS)
    for first in (0, 16):
        assert torch.equal(found.cos[:, first : first + 4], part.cos[:, first // 4 : first // 4 + 4])
        assert torch.equal(found.sin[:, first : first + 4], part.sin[:, first // 4 : first // 4 + 4])
        assert torch.equal(found.cos[:, first + 4 : first + 16], torch.ones(8, 12))
