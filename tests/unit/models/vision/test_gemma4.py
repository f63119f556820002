"""Gemma 4's tower: bounds of its linear layers, and the places of patches."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from inflight.models.vision.gemma4 import Gemma4Tower
from tests.support.vision_models import (
    VISION_CONFIGS,
    draw_image,
    encode,
    load,
    reference_features,
    reference_model,
    write_vision_model,
)
from tests.unit.models.test_encoders import difference

GRID = (1, 3, 6)


def test_each_bound_counts(tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS["gemma4"][1], tmp_path / "model", seed=1)
    file = folder / "model.safetensors"
    stored = load_file(file)
    tower = load(folder).tower
    assert isinstance(tower, Gemma4Tower)
    pixels = draw_image(tower.spec, GRID, 0)
    before = tower.encode(pixels, GRID)
    prefix = "model.vision_tower.encoder.layers.1"
    for layer, bound in (
        ("self_attn.q_proj", "input_min"),
        ("mlp.up_proj", "output_max"),
        ("self_attn.o_proj", "input_max"),
    ):
        name = f"{prefix}.{layer}.{bound}"
        save_file({**stored, name: stored[name] * 0.1}, file, metadata={"format": "pt"})
        found, expected = encode(load(folder), pixels, GRID), reference_features(reference_model(folder), pixels, GRID)
        assert difference([found], [expected]) < 1e-4
        assert not torch.equal(found, before)


def test_rows_and_columns_have_places_of_their_own(tmp_path: Path) -> None:
    """An image and the same image on its side differ by more than the order of their tokens."""
    folder = write_vision_model(VISION_CONFIGS["gemma4"][0], tmp_path / "model", seed=2)
    model = load(folder)
    tower = model.tower
    assert isinstance(tower, Gemma4Tower)
    pixels = draw_image(tower.spec, (1, 4, 4), 3)
    turned = pixels.view(4, 4, -1).transpose(0, 1).reshape(pixels.shape)
    upright = encode(model, pixels, (1, 4, 4)).view(2, 2, -1)
    on_its_side = encode(model, turned, (1, 4, 4)).view(2, 2, -1).transpose(0, 1)
    assert float((upright - on_its_side).abs().max()) > 0.1
