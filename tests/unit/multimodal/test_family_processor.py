"""The truth is transformers' processor of each family, called on a whole prompt with several images."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from inflight.errors import ConfigError, InvalidRequestError
from inflight.multimodal.expansion import expand_text, expand_tokens
from inflight.multimodal.family_processor import FamilyProcessor
from inflight.multimodal.messages import Start
from inflight.multimodal.processed import digest_of
from tests.support.image_models import FAMILIES, ImageFamily, drawing, processor_of_transformers, write_image_model

SIZES = [(300, 200), (40, 511), (700, 550), (1, 1)]
PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 32,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
CASES = [
    *((name, {}) for name in FAMILIES),
    ("gemma3", {"do_pan_and_scan": True}),
    ("gemma3", PAN_AND_SCAN),
    ("smolvlm", {"do_image_splitting": False}),
    ("smolvlm", {"size": {"longest_edge": 512}}),
    ("qwen2_5_vl", {"size": {"shortest_edge": 3136, "longest_edge": 50176}}),
    ("qwen3_vl", {"size": {"shortest_edge": 65536, "longest_edge": 131072}}),
]


@pytest.fixture(scope="module")
def processors(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[ImageFamily, FamilyProcessor, Any, Tokenizer]]:
    made = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        family = write_image_model(folder, name)
        truth = processor_of_transformers(folder, family)
        own = FamilyProcessor(Start(folder=folder, tokenizer=folder))
        made[name] = family, own, truth, Tokenizer.from_file(str(folder / "tokenizer.json"))
    return made


@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_ids_and_pixels_are_those_of_transformers(
    name: str, options: dict[str, Any], processors: dict[str, tuple[ImageFamily, FamilyProcessor, Any, Tokenizer]]
) -> None:
    family, own, truth, tokenizer = processors[name]
    drawn = [drawing(*size, seed) for seed, size in enumerate(SIZES)]
    text = "".join(f"Image {number}: {family.placeholder} and\n" for number in range(len(drawn))) + "what is it?"
    expected = truth(images=drawn, text=text, images_kwargs={**options, "return_tensors": "np"})

    images = [own.process(image, options) for image in drawn]
    ids = tokenizer.encode(expand_text(text, images)).ids
    assert ids == expected["input_ids"][0]
    short = tokenizer.encode(text).ids
    assert expand_tokens(short, images, lambda each: tokenizer.encode(each).ids) == ids

    inputs = [each for image in images for each in image.inputs]
    if "image_grid_thw" in expected:
        assert [each.grid for each in inputs] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
        pixels = np.concatenate([each.pixels for each in inputs])
        assert np.array_equal(pixels, expected["pixel_values"])
        assert all(each.num_tokens == np.prod(each.grid) // 4 for each in inputs)
    elif "image_position_ids" in expected:
        for each, pixels, places in zip(inputs, expected["pixel_values"], expected["image_position_ids"], strict=True):
            is_patch = (places >= 0).all(axis=1)
            assert np.array_equal(each.pixels, pixels[is_patch])
            rows, columns = np.indices(each.grid[1:]).reshape(2, -1)
            assert np.array_equal(places[is_patch], np.stack([columns, rows], axis=1))
            assert each.num_tokens == len(each.pixels) // 9
    else:
        whole = expected["pixel_values"].reshape(-1, *expected["pixel_values"].shape[-3:])
        if "pixel_attention_mask" in expected:  # without the padding for images with fewer tiles
            is_tile = expected["pixel_attention_mask"].reshape(len(whole), -1).any(axis=1)
            assert expected["pixel_attention_mask"].reshape(len(whole), -1)[is_tile].all()
            whole = whole[is_tile]
        assert np.array_equal(np.stack([each.pixels for each in inputs]), whole)
        patch_size = family.config["vision_config"]["patch_size"]
        assert {each.grid for each in inputs} == {(1, whole.shape[2] // patch_size, whole.shape[3] // patch_size)}

    assert ids.count(tokenizer.token_to_id(family.image_token)) == sum(each.num_tokens for each in inputs)
    assert all(each.digest == digest_of(each.pixels, each.grid) for each in inputs)
    assert all(each.pixels.dtype == np.float32 for each in inputs)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_the_limits_of_pixels_can_be_given_one_by_one(
    name: str, processors: dict[str, tuple[ImageFamily, FamilyProcessor, Any, Tokenizer]]
) -> None:
    _, own, truth, _ = processors[name]
    usual = dict(truth.image_processor.size)
    for options, size in (
        ({"max_pixels": 40_000}, {**usual, "longest_edge": 40_000}),
        ({"min_pixels": 100_000}, {**usual, "shortest_edge": 100_000}),
        ({"min_pixels": 10_000, "max_pixels": 40_000}, {"shortest_edge": 10_000, "longest_edge": 40_000}),
    ):
        if size["shortest_edge"] > size["longest_edge"]:
            continue
        found = own.process(drawing(600, 200), options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = truth.image_processor([drawing(600, 200)], size=size, return_tensors="np")
        assert np.array_equal(found.inputs[0].pixels, expected["pixel_values"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_vl", {"max_pixel": 5}),
        ("qwen3_vl", {"patch_size": 8}),  # the weights need another one
        ("qwen3_vl", {"merge_size": 1}),
        ("qwen3_vl", {"return_tensors": "pt"}),
        ("qwen3_vl", {"size": "large"}),
        ("qwen3_vl", {"size": {"height": 4, "width": 4}}),
        ("qwen3_vl", {"max_pixels": "many"}),
        ("qwen3_vl", {"image_std": [0.0, 0.0, 0.0]}),
        ("gemma3", {"size": {"height": 448, "width": 448}}),  # so many tokens would not come of it
        ("gemma3", {"do_resize": False}),
        ("smolvlm", {"max_image_size": {"longest_edge": 256}}),
        ("smolvlm", {"max_pixels": 5}),
        ("smolvlm", {"size": {"longest_edge": 10**9}}),  # larger than the server's
        ("smolvlm", {"size": {"longest_edge": -1}}),
        ("qwen3_vl", {"max_pixels": 10**9}),
        ("qwen2_5_vl", {"min_pixels": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_option_is_refused(
    name: str, options: dict[str, Any], processors: dict[str, tuple[ImageFamily, FamilyProcessor, Any, Tokenizer]]
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        processors[name][1].process(drawing(300, 200), options)
    assert error.value.param == "mm_processor_kwargs"
    assert processors[name][1].process(drawing(300, 200), {}).inputs


def test_an_image_that_the_processor_refuses(
    processors: dict[str, tuple[ImageFamily, FamilyProcessor, Any, Tokenizer]],
) -> None:
    with pytest.raises(InvalidRequestError, match="aspect ratio") as error:
        processors["qwen3_vl"][1].process(drawing(4000, 2), {})
    assert error.value.param == ""


def test_an_image_without_a_token_is_refused(
    processors: dict[str, tuple[ImageFamily, FamilyProcessor, Any, Tokenizer]],
) -> None:
    """LightOnOCR's processor makes none of an image of one pixel."""
    with pytest.raises(InvalidRequestError, match=r"makes no token of an image of 2x1 pixels: send a larger image"):
        processors["qwen3_vl"][1]._whole({"input_ids": [[1, 2, 3]]}, drawing(2, 1))


def test_digests_differ_with_pixels_and_grid() -> None:
    pixels = np.zeros((4, 8), dtype=np.float32)
    other = pixels.copy()
    other[3, 7] = 1e-9
    found = {
        digest_of(pixels, (1, 2, 2)),
        digest_of(pixels, (1, 1, 4)),
        digest_of(pixels.reshape(2, 16), (1, 2, 2)),
        digest_of(other, (1, 2, 2)),
    }
    assert len(found) == 4
    assert digest_of(pixels.copy(), (1, 2, 2)) in found


@pytest.mark.parametrize("wrong", ["no files", "an unknown class", "a text model"])
def test_a_folder_without_a_processor_is_refused(wrong: str, tmp_path: Path) -> None:
    write_image_model(tmp_path, "qwen3_vl")
    if wrong == "no files":
        for file in tmp_path.glob("*.json"):
            file.unlink()
    else:
        (tmp_path / "preprocessor_config.json").unlink()
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama"} if wrong == "a text model" else {"model_type": "new_vl"})
        )
    with pytest.raises(ConfigError, match="no processor"):
        FamilyProcessor(Start(folder=tmp_path, tokenizer=tmp_path))
