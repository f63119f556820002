"""The tokens of a prompt that stand for its images become `ImagesPart`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inflight.config.vision import Idefics3VisionSpec
from inflight.errors import InvalidRequestError
from inflight.multimodal.image_parts import images_part
from inflight.multimodal.processed import ProcessedImage, ProcessedInput
from tests.support.expanded_images import IMAGE, encode, image_of

TOWER = Idefics3VisionSpec(
    image_token_id=IMAGE,
    out_size=8,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    mlp_size=8,
    merge_size=1,
    patch_size=1,
    num_channels=3,
    positions_per_side=99,
    eps=1e-5,
    activation="gelu",
)


def part_of(text: str, *images: ProcessedImage) -> list[tuple[int, int]]:
    part = images_part(np.array(encode(text), dtype=np.int32), images, TOWER)
    return [(each.start, each.num_tokens) for each in part.images]


def test_each_input_gets_its_tokens() -> None:
    assert part_of("a[@@]b[@|@@@]", image_of(2), image_of(1, 3)) == [(2, 2), (7, 1), (9, 3)]


def test_images_may_stand_side_by_side() -> None:
    assert part_of("@@@@@", image_of(2), image_of(3)) == [(0, 2), (2, 3)]


@pytest.mark.parametrize("text", ["", "@", "@@@@@@", "@ @@@@", "@@@ @@", "@@ @ @@"])
def test_tokens_of_images_at_other_places_are_refused(text: str) -> None:
    assert part_of("@@ @@@", image_of(2), image_of(3))
    with pytest.raises(InvalidRequestError):
        part_of(text, image_of(2), image_of(3))


def test_an_image_that_the_tower_makes_other_embeddings_of_is_refused() -> None:
    for grid in ((1, 1, 3), (1, 0, 2)):
        wrong = ProcessedInput(pixels=np.zeros((2, 2), dtype=np.float32), grid=grid, num_tokens=2, digest=bytes(32))
        image = ProcessedImage(placeholder="@", expansion="@@", inputs=(wrong,), place="here")
        with pytest.raises(InvalidRequestError, match=r"^here: ") as error:
            images_part(np.array(encode("@@@@"), dtype=np.int32), [image_of(2), image], TOWER)
        assert error.value.param == "here"


def test_an_image_with_too_many_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 16384") as error:
        part_of("@" * 20_000, replace(image_of(20_000), place="here"))
    assert error.value.param == "here"


def test_the_part_has_what_the_processor_made() -> None:
    image = image_of(2, digest=bytes(range(32)))
    [found] = images_part(np.array([IMAGE, IMAGE], dtype=np.int32), [image], TOWER).images
    assert found.pixels is image.inputs[0].pixels
    assert (found.digest, found.grid) == (image.inputs[0].digest, image.inputs[0].grid)
