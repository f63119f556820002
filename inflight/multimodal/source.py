"""The forms in which a prompt may have an image: as a URL, the content of a file, a path, an image of Pillow, or an array.

`check_source` is quick, and finds wrong forms and forbidden URLs before anything is read. `read_source` may take long, so a
thread calls it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inflight.errors import InvalidRequestError
from inflight.interface.framing import ByteArray
from inflight.multimodal.decode import MAX_PIXELS, is_image_object, pixels_of
from inflight.multimodal.fetch import WebUrl, fetch, read_web_url
from inflight.multimodal.settings import MAX_IMAGE_BYTES, ImageSettings
from inflight.multimodal.urls import path_of_url, read_data_url, read_file, read_local_file


@dataclass(frozen=True, slots=True)
class ImageContent:
    """
    Attributes:
        content: the bytes of an image file, or of pixels.
        shape: the shape of the pixels: [height, width] or [height, width, 1, 3 or 4]; None if `content` is a file.
    """

    content: ByteArray
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DataUrl:
    url: str


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file that a `file:` URL names. It must be in the folder of the settings."""

    path: Path


@dataclass(frozen=True, slots=True)
class PythonImage:
    """An image of Pillow, or a numpy array."""

    image: Any  # Any: of Pillow, which is not imported here


Source = WebUrl | DataUrl | LocalFile | Path | ImageContent | PythonImage


def check_source(given: object, settings: ImageSettings) -> Source:
    """Returns a source that `read_source` takes.

    Raises:
        InvalidRequestError: `given` has no form of an image, or its URL is forbidden.
    """
    if isinstance(given, str):
        return _check_url(given, settings)
    if isinstance(given, Path):
        return given
    if isinstance(given, bytes | bytearray | memoryview):
        return ImageContent(np.frombuffer(bytes(given), dtype=np.uint8))
    if is_image_object(given) or isinstance(given, np.ndarray):
        return PythonImage(given)
    raise InvalidRequestError(
        f"an image is a {type(given).__name__}; give a URL, the bytes of an image file, a pathlib.Path, an image of Pillow, "
        "or a uint8 array [height, width, 3]"
    )


def read_source(source: Source, settings: ImageSettings) -> ImageContent:
    """Read an image, which may take `settings.fetch_seconds`.

    Raises:
        InvalidRequestError: there is no image, it is forbidden, or it has too many bytes.
    """
    match source:
        case ImageContent():
            found = source
        case DataUrl(url=url):
            found = ImageContent(read_data_url(url))
        case WebUrl():
            found = ImageContent(fetch(source, settings.fetch_seconds, MAX_IMAGE_BYTES))
        case LocalFile(path=path):
            assert settings.local_path is not None  # or `check_source` would have refused the URL
            found = ImageContent(read_local_file(path, settings.local_path))
        case PythonImage(image=np.ndarray() as pixels):
            found = _read_array(pixels)
        case PythonImage(image=image):
            pixels = pixels_of(image)
            found = ImageContent(pixels.reshape(-1), pixels.shape)
        case Path():
            found = ImageContent(read_file(source))
    if found.shape is None and len(found.content) > MAX_IMAGE_BYTES:
        raise InvalidRequestError(
            f"the image has {len(found.content)} bytes; at most {MAX_IMAGE_BYTES} are allowed: send a smaller one"
        )
    if len(found.content) == 0:
        raise InvalidRequestError("the image is empty")
    return found


def _check_url(url: str, settings: ImageSettings) -> Source:
    scheme = url[:16].partition(":")[0].lower()
    if scheme == "data":
        return DataUrl(url)
    if scheme in ("http", "https"):
        return read_web_url(url, settings.domains)
    if scheme == "file":
        return LocalFile(path_of_url(url, settings.local_path))
    raise InvalidRequestError(
        f"the image {url[:40]!r} is not a URL; give one that begins with data:, https:, http: or file: (in Python, a "
        "pathlib.Path for a file)"
    )


def _read_array(pixels: np.ndarray) -> ImageContent:
    is_image = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4))
    if pixels.dtype != np.uint8 or not is_image or pixels.size == 0:
        raise InvalidRequestError(
            f"an image is an array of {pixels.dtype} with the shape {list(pixels.shape)}; give uint8 with the shape "
            "[height, width] or [height, width, 1, 3 or 4]"
        )
    if pixels.shape[0] * pixels.shape[1] > MAX_PIXELS:
        raise InvalidRequestError(
            f"an image has {pixels.shape[0] * pixels.shape[1]} pixels; at most {MAX_PIXELS} are allowed"
        )
    copied = pixels.copy()  # the caller may change its array later
    return ImageContent(copied.reshape(-1), copied.shape)
