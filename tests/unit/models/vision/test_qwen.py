"""The towers of Qwen: windows, and images of several frames."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch

from inflight.config.vision import Grid
from inflight.models.vision.qwen import Qwen25Tower
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


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_patches_see_only_those_of_their_frame(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS[family][0], tmp_path / "model", seed=1)
    model, truth = load(folder), reference_model(folder)
    assert model.tower is not None
    grid = (3, 8, 10)
    pixels = draw_image(model.tower.spec, grid, 1)
    found = encode(model, pixels, grid)
    assert difference([found], [reference_features(truth, pixels, grid)]) < 1e-4
    one = (1, 8, 10)
    assert difference([encode(model, pixels[80:160], one)], [found[20:40]]) < 1e-4


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 12, 6), (1, 26, 38), (2, 8, 14), (1, 2, 60)])
def test_windows(grid: Grid, tmp_path: Path) -> None:
    tower = load(write_vision_model(VISION_CONFIGS["qwen2_5_vl"][0], tmp_path / "model", seed=2)).tower
    assert isinstance(tower, Qwen25Tower)
    assert tower.spec.window == 3
    order, segments = tower.windows(grid)
    frames, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
    assert sorted(order.tolist()) == list(range(frames * rows * columns))
    first = 0
    for size in segments:
        tokens = order[first : first + size // 4]
        first += size // 4
        places = {
            (int(each) // (rows * columns), int(each) // columns % rows // 3, int(each) % columns // 3)
            for each in tokens
        }
        assert len(places) == 1, "tokens of several windows"
        assert tokens.tolist() == sorted(tokens.tolist())
    assert first == len(order)
    assert len(list(groupby(segments))) <= 4 * frames
    assert len(segments) == frames * -(-rows // 3) * -(-columns // 3)


def test_pixels_of_another_grid_are_refused(tmp_path: Path) -> None:
    tower = load(write_vision_model(VISION_CONFIGS["qwen3_vl"][0], tmp_path / "model", seed=3)).tower
    assert tower is not None
    pixels = draw_image(tower.spec, (1, 4, 4), 1)
    for grid in ((1, 4, 6), (2, 4, 4)):
        with pytest.raises(AssertionError):
            tower.begin(pixels, grid)
    assert torch.isfinite(tower.encode(pixels, (1, 2, 8))).all()
