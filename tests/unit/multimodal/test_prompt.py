"""What a prompt may say about its images, and which forms an image may have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequestError
from inflight.interface.image_prompts import has_images
from inflight.multimodal.prompt import read_images
from inflight.multimodal.settings import ImageSettings
from inflight.multimodal.source import check_source, read_source
from tests.support.image_models import drawing, file_of

SETTINGS = ImageSettings(
    max_images=3, cache_bytes=0, options={"do_resize": False}, local_path=Path("/"), domains=frozenset({"a.example"})
)


def prompt_of(images: object, **more: Any) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": images}, **more}


@pytest.mark.parametrize(
    "prompt", ["text", [1, 2], {"prompt": "text"}, {"prompt": "", "multi_modal_data": {}}, prompt_of([])]
)
def test_a_prompt_without_images(prompt: object) -> None:
    assert not has_images(prompt)


def test_one_image_needs_no_list() -> None:
    assert has_images(prompt_of("data:;base64,AAAA"))
    given, options = read_images(prompt_of(b"a", multi_modal_uuids={"image": "x"}), SETTINGS)
    assert [each.uuid for each in given] == ["x"]
    assert options == {"do_resize": False}


def test_images_with_and_without_uuids() -> None:
    prompt = prompt_of([b"a", None, b"c"], multi_modal_uuids={"image": ["x", "y", None]})
    given, _ = read_images(prompt, SETTINGS)
    assert [(each.source is None, each.uuid) for each in given] == [(False, "x"), (True, "y"), (False, None)]


def test_options_of_a_prompt_go_before_those_of_the_engine() -> None:
    _, options = read_images(prompt_of(b"a", mm_processor_kwargs={"do_resize": True, "max_pixels": 5}), SETTINGS)
    assert options == {"do_resize": True, "max_pixels": 5}


def test_a_prompt_may_name_its_images() -> None:
    given = prompt_of([b"a", 5], multi_modal_places=["the first", "the second"])
    with pytest.raises(InvalidRequestError, match=r"^the second: ") as error:
        read_images(given, SETTINGS)
    assert error.value.param == "the second"
    given = prompt_of([b"a"], multi_modal_places=["the first"], multi_modal_uuids={"image": [""]})
    with pytest.raises(InvalidRequestError, match=r"^the first: "):
        read_images(given, SETTINGS)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (prompt_of([b"a"], multi_modal_places=[]), "multi_modal_places"),
        (prompt_of([b"a"], multi_modal_places="x"), "multi_modal_places"),
        (prompt_of([b"a"] * 4), "multi_modal_data['image']"),
        (prompt_of([b"a", None]), "multi_modal_data['image'][1]"),
        (prompt_of([b"a", 5]), "multi_modal_data['image'][1]"),
        (prompt_of(["a.png"]), "multi_modal_data['image'][0]"),
        (prompt_of(["/etc/passwd"]), "multi_modal_data['image'][0]"),
        (prompt_of(["ftp://a.example/a.png"]), "multi_modal_data['image'][0]"),
        (prompt_of(["https://b.example/a.png"]), "multi_modal_data['image'][0]"),
        (prompt_of([{"url": "https://a.example/a.png"}]), "multi_modal_data['image'][0]"),
        (prompt_of([b"a"], multi_modal_uuids={"image": []}), "multi_modal_uuids"),
        (prompt_of([b"a"], multi_modal_uuids={"image": [5]}), "multi_modal_uuids['image'][0]"),
        (prompt_of([b"a"], multi_modal_uuids={"image": [""]}), "multi_modal_uuids['image'][0]"),
        (prompt_of([b"a"], multi_modal_uuids={"image": ["x" * 257]}), "multi_modal_uuids['image'][0]"),
        (prompt_of([b"a"], multi_modal_uuids={"video": ["x"]}), "multi_modal_uuids"),
        (prompt_of([b"a"], multi_modal_uuids=["x"]), "multi_modal_uuids"),
        (prompt_of([b"a"], mm_processor_kwargs=[1]), "mm_processor_kwargs"),
        (prompt_of([b"a"], mm_processor_kwargs={"a": object()}), "mm_processor_kwargs"),
        (prompt_of([b"a"], mm_processor_kwargs={"a": math.nan}), "mm_processor_kwargs"),
        ({"prompt": "", "multi_modal_data": {"video": b"a"}}, "multi_modal_data"),
        ({"prompt": "", "multi_modal_data": [b"a"]}, "multi_modal_data"),
    ],
)
def test_a_wrong_prompt_is_refused_with_its_place(prompt: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_images(prompt, SETTINGS)
    assert error.value.param == param


# -- sources -----------------------------------------------------------------------------------------------------------


def test_all_forms_of_an_image_are_read(tmp_path: Path) -> None:
    content = file_of(drawing(8, 6))
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for given in (content, bytearray(content), memoryview(content), path, f"file://{path}"):
        found = read_source(check_source(given, SETTINGS), SETTINGS)
        assert (found.content.tobytes(), found.shape) == (content, None)


def test_pixels_are_read_as_they_are() -> None:
    pixels = np.asarray(drawing(8, 6))
    for given in (drawing(8, 6), pixels, pixels[:, ::-1][:, ::-1]):
        found = read_source(check_source(given, SETTINGS), SETTINGS)
        assert found.shape == (6, 8, 3)
        assert np.array_equal(found.content, pixels.reshape(-1))


def test_an_array_may_change_afterwards() -> None:
    pixels = np.array(drawing(8, 6))
    found = read_source(check_source(pixels, SETTINGS), SETTINGS)
    expected = pixels.reshape(-1).copy()
    pixels[:] = 0
    assert np.array_equal(found.content, expected)


@pytest.mark.parametrize(
    "given",
    [
        np.zeros((4, 4, 3), dtype=np.float32),
        np.zeros((4, 4, 2), dtype=np.uint8),
        np.zeros((3, 4, 4, 3), dtype=np.uint8),
        np.zeros((4,), dtype=np.uint8),
        np.zeros((0, 4, 3), dtype=np.uint8),
        np.broadcast_to(np.uint8(0), (8193, 8192)),
        b"",
        Path("/nowhere/a.png"),
        Path("/"),
    ],
    ids="floats channels dimensions vector empty large nothing missing folder".split(),
)
def test_an_image_that_cannot_be_read_is_refused(given: object) -> None:
    source = check_source(given, SETTINGS)
    with pytest.raises(InvalidRequestError):
        read_source(source, SETTINGS)
