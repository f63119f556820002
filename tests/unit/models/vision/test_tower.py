"""Every vision tower: its embeddings are those of transformers, for each image, format of the weights and place of a rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.config.engine import QuantizationConfig
from inflight.config.pipeline_stage import pipeline_stage
from inflight.config.ranks import RankLayout
from inflight.config.safetensors_file import model_name
from inflight.config.vision import Gemma3VisionSpec, Grid, VisionSpec
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import CheckpointError
from inflight.models.causal_lm import CausalLM
from inflight.models.vision import division
from inflight.models.vision.block import VisionBlock
from inflight.models.vision.gemma4 import Gemma4VisionBlock
from inflight.models.vision.tower import VisionTower
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
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

EACH = [(family, index) for family, configs in VISION_CONFIGS.items() for index in range(len(configs))]
ONLY_SQUARES = ("smolvlm", "idefics3")  # transformers joins their patches as if an image were square
KERNELS = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="the C++ kernels are not here")


def tower_of(model: CausalLM) -> VisionTower:
    assert model.tower is not None
    return model.tower


def grids(family: str, spec: VisionSpec) -> list[Grid]:
    """The smallest one, and larger ones."""
    size = spec.merge_size
    if isinstance(spec, Gemma3VisionSpec):
        return [(1, spec.positions_per_side, spec.positions_per_side)] * 2
    if family in ONLY_SQUARES:
        return [(1, size, size), (1, 2 * size, 2 * size), (1, 5 * size, 5 * size)]
    return [(1, size, size), (1, 2 * size, 5 * size), (1, 9 * size, 3 * size)]


@pytest.mark.parametrize(("family", "index"), EACH)
def test_embeddings(family: str, index: int, tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS[family][index], tmp_path / "model", seed=index)
    model, truth = load(folder), reference_model(folder)
    spec = tower_of(model).spec
    for number, grid in enumerate(grids(family, spec)):
        pixels = draw_image(spec, grid, number)
        found, expected = encode(model, pixels, grid), reference_features(truth, pixels, grid)
        assert found.shape == (spec.num_tokens(grid), spec.out_size * (1 + spec.num_deepstack))
        assert difference([found], [expected]) < 1e-4
        assert float(expected.std()) > 0.3, "embeddings that are all alike would agree whatever the tower does"
        assert torch.equal(encode(model, pixels, grid), found)
        other = pixels.clone()
        other.view(-1)[7] += 0.5  # one pixel
        assert not torch.equal(encode(model, other, grid), found)


@pytest.mark.parametrize("family", VISION_CONFIGS)
def test_bfloat16(family: str, tmp_path: Path) -> None:
    """At most twice as far from the truth as transformers in bfloat16."""
    folder = write_vision_model(VISION_CONFIGS[family][0], tmp_path / "model", seed=5)
    model = load(folder, torch.bfloat16)
    spec = tower_of(model).spec
    grid = grids(family, spec)[-1]
    pixels = draw_image(spec, grid, 1)
    truth = reference_features(reference_model(folder), pixels, grid)
    limit = 2 * difference([reference_features(reference_model(folder, torch.bfloat16), pixels, grid)], [truth])
    found = encode(model, pixels, grid)
    assert found.dtype == torch.bfloat16
    assert difference([found], [truth]) < limit


@KERNELS
@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.999), ("int4", 0.9)])
@pytest.mark.parametrize("family", VISION_CONFIGS)
def test_quantized_weights(family: str, quantization: str, least: float, tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS[family][0], tmp_path / "model", seed=6)
    model = load(folder, quantization=QuantizationConfig(layers=quantization))
    spec = tower_of(model).spec
    grid = grids(family, spec)[-1]
    pixels = draw_image(spec, grid, 2)
    found, truth = encode(model, pixels, grid), reference_features(reference_model(folder), pixels, grid)
    assert not torch.equal(found, encode(load(folder), pixels, grid))
    assert float(F.cosine_similarity(found.flatten(), truth.flatten(), dim=0)) > least


@pytest.mark.parametrize("patches_of_slice", [1024, 7])
@pytest.mark.parametrize("family", VISION_CONFIGS)
def test_images_that_are_computed_in_turns(
    family: str, patches_of_slice: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some slices of one image, then some of another one."""
    monkeypatch.setattr(VisionSpec, "patches_of_slice", patches_of_slice)
    folder = write_vision_model(VISION_CONFIGS[family][0], tmp_path / "model", seed=7)
    model = load(folder)
    tower = tower_of(model)
    chosen = grids(family, tower.spec)
    images = [draw_image(tower.spec, grid, number) for number, grid in enumerate(chosen)]
    alone = [encode(model, pixels, grid) for pixels, grid in zip(images, chosen, strict=True)]
    with torch.inference_mode():
        states = [tower.begin(pixels, grid) for pixels, grid in zip(images, chosen, strict=True)]
        left = [tower.spec.num_slices(grid) for grid in chosen]
        assert (max(left) > tower.spec.num_layers) == (patches_of_slice == 7)
        while max(left) > 0:
            for number, state in enumerate(states):
                assert (state.layer == tower.spec.num_layers) == (left[number] <= 0)
                tower.advance(state, 1 + number)
                left[number] -= 1 + number
        found = [tower.finish(state) for state in states]
        assert all(map(torch.equal, found, alone))
        if family not in ONLY_SQUARES:
            truth = reference_model(folder)
            expected = [reference_features(truth, pixels, grid) for pixels, grid in zip(images, chosen, strict=True)]
            assert max(map(difference, [[each] for each in found], [[each] for each in expected])) < 1e-4


@pytest.mark.parametrize("family", VISION_CONFIGS)
def test_ranks_and_stages(family: str, tmp_path: Path) -> None:
    """Each rank of the first stage has the whole tower; other stages have none."""
    folder = write_vision_model(VISION_CONFIGS[family][0], tmp_path / "model", seed=8)
    model = load(folder)
    spec = tower_of(model).spec
    grid = grids(family, spec)[1]
    pixels = draw_image(spec, grid, 3)
    alone = encode(model, pixels, grid)
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=60)
    with ThreadPoolExecutor(2) as ranks:
        groups = [worlds.of(rank).tensor_parallel_group("model") for rank in range(2)]
        models = list(ranks.map(lambda group: load(folder, tp=group), groups))
    assert all(torch.equal(encode(each, pixels, grid), alone) for each in models)
    num_layers = model_layers(model)
    first, second = (load(folder, stage=pipeline_stage((1, num_layers - 1), index)) for index in range(2))
    assert torch.equal(encode(first, pixels, grid), alone)
    assert second.tower is None


@pytest.mark.parametrize("patches_of_slice", [1024, 7])
@pytest.mark.parametrize("family", VISION_CONFIGS)
def test_ranks_that_divide_the_patches_of_an_image(
    family: str, patches_of_slice: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VisionSpec, "patches_of_slice", patches_of_slice)
    folder = write_vision_model(VISION_CONFIGS[family][0], tmp_path / "model", seed=12)
    model = load(folder)
    grid = grids(family, tower_of(model).spec)[-1]
    pixels = draw_image(tower_of(model).spec, grid, 3)
    alone = encode(model, pixels, grid)
    monkeypatch.setattr(division, "FEWEST_PATCHES", 2)
    counts: list[int] = []
    kind = VisionBlock if family != "gemma4" else Gemma4VisionBlock
    monkeypatch.setattr(kind, "forward", counting(kind.forward, counts))
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=60)
    with ThreadPoolExecutor(2) as ranks:
        groups = [worlds.of(rank).tensor_parallel_group("model") for rank in range(2)]
        models = list(ranks.map(lambda group: load(folder, tp=group), groups))
        found = list(ranks.map(lambda each: encode(each, pixels, grid), models))
    assert torch.equal(found[0], found[1])
    assert difference([found[0]], [alone]) < 1e-5
    assert sum(counts) == grid[1] * grid[2] * tower_of(model).spec.num_layers, "each patch is computed once"


def counting(forward: Callable[..., Tensor], counts: list[int]) -> Callable[..., Tensor]:
    def counted(*args: Any) -> Tensor:
        counts.append(args[-1] - args[-2])
        return forward(*args)

    return counted


def model_layers(model: CausalLM) -> int:
    layers = model.layers
    assert isinstance(layers, torch.nn.ModuleList)
    return len(layers)


@pytest.mark.parametrize("family", VISION_CONFIGS)
def test_a_model_without_its_tower(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS[family][0], tmp_path / "model", seed=9)
    model = load(folder, language_model_only=True)
    assert model.tower is None
    file = folder / "model.safetensors"
    whole = load_file(file)
    text = load(folder, load_format="dummy", language_model_only=True)
    assert sum(each.numel() for each in text.parameters()) == sum(each.numel() for each in model.parameters())
    # a checkpoint of which the tower was left out, and one with more than the tower
    prefixes = tower_of(load(folder)).spec.prefixes
    of_text = {name: tensor for name, tensor in whole.items() if not model_name(name, ()).startswith(prefixes)}
    save_file(of_text, file)
    load(folder, language_model_only=True)
    with pytest.raises(CheckpointError, match="language_model_only"):
        load(folder)
    save_file({**whole, f"{prefixes[0]}other.weight": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match=r"other\.weight"):
        load(folder)


@pytest.mark.parametrize("family", VISION_CONFIGS)
def test_random_weights(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS[family][0], tmp_path / "model", seed=10)
    first, again = (load(folder, load_format="dummy") for _ in range(2))
    spec = tower_of(first).spec
    grid = grids(family, spec)[1]
    found = encode(first, draw_image(spec, grid, 4), grid)
    assert torch.isfinite(found).all() and float(found.std()) > 0
    assert torch.equal(encode(again, draw_image(spec, grid, 4), grid), found)
