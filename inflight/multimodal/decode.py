"""Decodes image files with the package Pillow (PIL), which is imported when the first image comes.

The result is what transformers' `load_image` makes of the same file: the first frame, turned as its EXIF orientation says,
in RGB. The number of pixels is known from the file's header, and is bounded before any pixel is decoded.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np

from inflight.errors import InvalidRequestError
from inflight.interface.framing import ByteArray

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 2**26  # of one image, such as 8,192 x 8,192: 200 MB in RGB
# Formats that Pillow decodes itself. Others are left out, because it starts programs for some of them.
FORMATS = "PNG JPEG MPO WEBP GIF BMP DIB TIFF PPM ICO JPEG2000 AVIF".split()


def decode_file(content: ByteArray) -> Image.Image:
    """Returns the image in an image file.

    Raises:
        InvalidRequestError: the bytes are no image of a known format, are damaged, or have too many pixels.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about damaged metadata
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, MAX_PIXELS
        Image.init()
        try:
            image = Image.open(io.BytesIO(content.data), formats=[each for each in FORMATS if each in Image.OPEN])
            return ImageOps.exif_transpose(image).convert("RGB")
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            raise InvalidRequestError(f"the image has more than {MAX_PIXELS} pixels; send a smaller one") from None
        except UnidentifiedImageError:
            raise InvalidRequestError(
                f"the {len(content)} bytes are not an image of a known format: PNG, JPEG, WebP, GIF, BMP, TIFF and others"
            ) from None
        except MemoryError:
            raise InvalidRequestError("the image needs too much memory; send a smaller one") from None
        except Exception as error:  # of Pillow's decoders: OSError, SyntaxError, ValueError, struct.error and others
            raise InvalidRequestError(
                f"the image file is truncated or damaged ({type(error).__name__}: {error})"
            ) from error
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def image_of_pixels(content: ByteArray, shape: tuple[int, ...]) -> Image.Image:
    """Returns the image of pixels of shape [height, width], or [height, width, 1, 3 or 4]."""
    from PIL import Image

    pixels = content.reshape(shape[:2] if shape[2:] == (1,) else shape)
    return Image.fromarray(pixels).convert("RGB")


def pixels_of(image: Image.Image) -> ByteArray:
    """Returns the pixels of an image that a program has opened: uint8 [height, width, 3].

    Raises:
        InvalidRequestError: its file is damaged, or it has too many pixels.
    """
    from PIL import ImageOps

    if image.width * image.height > MAX_PIXELS:
        raise InvalidRequestError(
            f"the image has {image.width}x{image.height} pixels; at most {MAX_PIXELS} are allowed"
        )
    try:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except Exception as error:  # the file may be read only now
        raise InvalidRequestError(f"the image cannot be read ({type(error).__name__}: {error})") from error


def is_image_object(given: object) -> bool:
    """Whether `given` is an image of Pillow. Does not import it."""
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(given).__mro__)
