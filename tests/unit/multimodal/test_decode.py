"""Decoded images equal those of transformers' `load_image`, and damaged or huge files are refused."""

from __future__ import annotations

import base64
import itertools
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from inflight.errors import InvalidRequestError
from inflight.multimodal import decode
from inflight.multimodal.decode import MAX_PIXELS, decode_file, image_of_pixels, is_image_object, pixels_of
from tests.support.image_models import as_bytes, drawing, file_of

MODES = {
    "PNG": "1 L LA P RGB RGBA I;16".split(),
    "JPEG": "L RGB CMYK".split(),
    "WEBP": "RGB RGBA".split(),
    "GIF": "1 L P RGB RGBA".split(),
    "BMP": "1 L P RGB".split(),
    "TIFF": "1 L LA P RGB RGBA CMYK I;16".split(),
}
ORIENTATIONS = (None, 1, 2, 3, 4, 5, 6, 7, 8)
CASES = [
    (form, mode, orientation)
    for form, modes in MODES.items()
    for mode, orientation in itertools.product(
        modes, ORIENTATIONS if form in ("PNG", "JPEG", "WEBP", "TIFF") else [None]
    )
]


def in_mode(mode: str, width: int = 31, height: int = 17) -> Image.Image:
    image = drawing(width, height)
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    if mode in ("LA", "RGBA"):
        image = image.convert(mode)
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image.convert(mode)


def file_in(form: str, mode: str, orientation: int | None) -> bytes:
    options = {}
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    return file_of(in_mode(mode), form, **options)


def load_image(content: bytes) -> Image.Image:
    """transformers' function, for the content of a file."""
    from transformers.image_utils import load_image

    return load_image(base64.b64encode(content).decode())


@pytest.mark.parametrize(("form", "mode", "orientation"), CASES)
def test_a_file_is_read_as_transformers_does(form: str, mode: str, orientation: int | None) -> None:
    content = file_in(form, mode, orientation)
    expected = load_image(content)
    found = decode_file(as_bytes(content))
    assert (found.mode, found.size) == ("RGB", expected.size)
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_orientations_differ() -> None:
    """So the test above would fail if orientations were ignored."""
    found = {np.asarray(decode_file(as_bytes(file_in("PNG", "RGB", each)))).tobytes() for each in ORIENTATIONS}
    assert len(found) == 8


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "TIFF"])
def test_an_animation_is_its_first_frame(form: str) -> None:
    frames = [drawing(20, 12, seed) for seed in range(3)]
    content = file_of(frames[0], form, save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(np.asarray(decode_file(as_bytes(content))), np.asarray(load_image(content)))
    if form in ("PNG", "TIFF"):
        assert np.array_equal(np.asarray(decode_file(as_bytes(content))), np.asarray(frames[0]))


def test_a_palette_with_transparency_is_read_as_transformers_does() -> None:
    content = file_of(drawing(9, 9).quantize(16), "PNG", transparency=3)
    assert np.array_equal(np.asarray(decode_file(as_bytes(content))), np.asarray(load_image(content)))


@pytest.mark.parametrize("form", sorted(MODES))
def test_a_truncated_file_is_refused_or_read_as_transformers_does(form: str) -> None:
    content = file_of(drawing(40, 30), form)
    num_refused = 0
    for size in range(0, len(content), 10):
        try:
            found = decode_file(as_bytes(content[:size]))
        except InvalidRequestError:
            num_refused += 1
            with pytest.raises(Exception):  # noqa: B017, PT011  # whatever Pillow raises
                load_image(content[:size])
        else:
            assert np.array_equal(np.asarray(found), np.asarray(load_image(content[:size])))
    assert num_refused > len(content) // 20


def png_of(width: int, height: int) -> bytes:
    """A small PNG file whose header claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [
        png_of(100_000, 100_000),
        png_of(2**31 - 1, 2**31 - 1),
        png_of(1, MAX_PIXELS + 1),
        png_of(8193, 8192),
        file_of(drawing(4, 4), "BMP")[:18] + struct.pack("<ii", 70_000, 70_000) + file_of(drawing(4, 4), "BMP")[26:],
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + file_of(drawing(4, 4), "GIF")[10:],
    ],
    ids="wide largest tall almost bmp gif".split(),
)
def test_a_bomb_is_refused_before_it_is_decoded(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: object) -> None:
        raise AssertionError("the pixels are decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(InvalidRequestError, match="pixels"):
        decode_file(as_bytes(content))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no image",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",  # Pillow would start a program for it
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        bytes(1000),
    ],
)
def test_what_is_no_image_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_file(as_bytes(content))


def test_a_lack_of_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(InvalidRequestError, match="memory"):
        decode_file(as_bytes(file_of(drawing(4, 4))))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4)])
def test_pixels_are_an_image(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    found = np.asarray(image_of_pixels(pixels.reshape(-1), shape))
    grey = pixels.reshape(5, 7, 1).repeat(3, axis=2) if pixels.size == 35 else pixels[..., :3]
    assert np.array_equal(found, grey)


def test_an_image_of_pillow_is_read_as_its_file(tmp_path: Path) -> None:
    content = file_in("JPEG", "RGB", 6)
    (tmp_path / "a.jpg").write_bytes(content)
    with Image.open(tmp_path / "a.jpg") as image:
        assert is_image_object(image)
        assert np.array_equal(pixels_of(image), np.asarray(load_image(content)))
        assert not np.array_equal(pixels_of(image), pixels_of(ImageOps.mirror(image)))


def test_a_wrong_image_of_pillow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(file_of(drawing(300, 300))[:-200])
    with Image.open(tmp_path / "a.png") as image, pytest.raises(InvalidRequestError, match="cannot be read"):
        pixels_of(image)
    monkeypatch.setattr(decode, "MAX_PIXELS", 99)
    with pytest.raises(InvalidRequestError, match="at most 99"):
        pixels_of(drawing(10, 10))


@pytest.mark.parametrize("given", [None, "a", b"a", Path("a"), np.zeros((2, 2, 3), dtype=np.uint8)])
def test_other_objects_are_no_images_of_pillow(given: object) -> None:
    assert not is_image_object(given)
