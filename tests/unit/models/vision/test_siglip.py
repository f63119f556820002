"""SigLIP towers: which patches become one token, and positions in images that are not square."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.models.vision.siglip import Idefics3Tower
from tests.support.vision_models import VISION_CONFIGS, draw_image, load, reference_model, write_vision_model
from tests.unit.models.test_encoders import difference


@pytest.mark.parametrize(("rows", "columns"), [(2, 10), (8, 4), (6, 14)])
def test_images_that_are_not_square(rows: int, columns: int, tmp_path: Path) -> None:
    """transformers joins the patches of such an image as if it were square. So the patches are compared before that."""
    folder = write_vision_model(VISION_CONFIGS["smolvlm"][0], tmp_path / "model", seed=3)
    tower, truth = load(folder).tower, reference_model(folder)
    assert isinstance(tower, Idefics3Tower)
    grid = (1, rows, columns)
    pixels = draw_image(tower.spec, grid, seed=4)
    with torch.inference_mode():
        patches = truth.model.vision_model(pixels[None]).last_hidden_state[0]
        state = tower.begin(pixels, grid)
        tower.advance(state, 3)
        embedded = tower.finish(state)
        assert difference([tower.post_layernorm(state.residual)], [patches]) < 1e-4
        # the first two rows and columns of patches are the first token
        square = torch.cat([patches[0], patches[1], patches[columns], patches[columns + 1]])
        first = truth.model.connector.modality_projection(square)
    assert embedded.shape == (rows * columns // 4, 64)
    assert difference([embedded[0]], [first]) < 1e-4


def test_pixels_beyond_the_last_patch_are_left_out(tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS["smolvlm"][0], tmp_path / "model", seed=5)
    tower, truth = load(folder).tower, reference_model(folder)
    assert isinstance(tower, Idefics3Tower)
    pixels = torch.randn((3, 19, 19), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        expected = truth.get_image_features(pixel_values=pixels[None, None]).pooler_output[0]
        assert difference([tower.encode(pixels, (1, 4, 4))], [expected]) < 1e-4
    with pytest.raises(AssertionError):
        tower.encode(pixels, (1, 4, 6))
