"""Reads `data:` URLs (RFC 2397) and files, also those that `file:` URLs (RFC 8089) name."""

import binascii
import os
import stat
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from inflight.errors import InvalidRequestError
from inflight.interface.framing import ByteArray
from inflight.multimodal.settings import MAX_IMAGE_BYTES

_MOST_TYPE = 1024  # characters before the content of a data: URL
_MOST_PATH = 4096  # bytes of a path, which is Linux's own limit; to resolve a longer one would take seconds
_PIECE = 2**18  # characters that are decoded at a time: other threads can run between two of them


def read_data_url(url: str) -> ByteArray:
    """Returns the content of a data: URL.

    Raises:
        InvalidRequestError: it is not base64, or has characters that base64 does not have.
    """
    begin, comma, _ = url[:_MOST_TYPE].partition(",")
    lower = begin.lower()
    if not (comma and lower.startswith("data:") and lower.endswith(";base64") and len(begin.split()) == 1):
        raise InvalidRequestError(
            "the data: URL of an image must be written as data:image/png;base64,... with the bytes of the file in base64"
        )
    first = len(begin) + len(comma)
    if (len(url) - first) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        raise InvalidRequestError(f"the image has more than {MAX_IMAGE_BYTES} bytes; send a smaller one")
    content = bytearray()
    for start in range(first, len(url), _PIECE):
        text = url[start : start + _PIECE]
        if text.endswith("=") and start + _PIECE < len(url):
            raise InvalidRequestError("the data: URL of an image has more characters after the end of its base64")
        time.sleep(0)  # lets other threads have the GIL, which they ask for only after 5 ms
        try:
            content += binascii.a2b_base64(text, strict_mode=True)
        except ValueError as error:
            raise InvalidRequestError(f"the data: URL of an image is not valid base64: {error}") from None
    return np.frombuffer(content, dtype=np.uint8)


def path_of_url(url: str, allowed: Path | None) -> Path:
    """Returns the path in a file: URL.

    Raises:
        InvalidRequestError: no files may be read, or it is no URL of a file on this machine.
    """
    if allowed is None:
        raise InvalidRequestError(
            "file: URLs are not allowed here: the server needs --allowed-local-media-path with the folder of the images"
        )
    if len(url) > _MOST_PATH:
        raise InvalidRequestError(f"the URL of a file has {len(url)} characters; at most {_MOST_PATH} are allowed")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidRequestError(f"the URL of an image cannot be read: {error}") from None
    path = unquote(parts.path)
    if (
        parts.netloc not in ("", "localhost")
        or not path.startswith("/")
        or "\0" in path
        or parts.query
        or parts.fragment
    ):
        raise InvalidRequestError("the URL of a file must be written as file:///folder/name.png")
    return Path(path)


def read_local_file(path: Path, allowed: Path) -> ByteArray:
    """Returns the content of a file in the folder `allowed`. Links are followed, and their target must be in the folder, too.

    Raises:
        InvalidRequestError: there is no such file, or it is outside of the folder.
    """
    folder = allowed.resolve()
    try:
        is_inside = path.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):  # a loop of links
        is_inside = False
    if not is_inside:
        raise InvalidRequestError("the URL names a file outside of the folder of --allowed-local-media-path")
    return read_file(path, folder)


def read_file(path: Path, folder: Path | None = None) -> ByteArray:
    """Returns the content of a file. `folder`: what was opened must be in it, even if links have changed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequestError(f"the file of an image cannot be read: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequestError("the file of an image is not a regular file")
        if folder is not None and not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(folder):
            raise InvalidRequestError("the URL names a file outside of the folder of --allowed-local-media-path")
        if status.st_size > MAX_IMAGE_BYTES:
            raise InvalidRequestError(
                f"the file of an image has {status.st_size} bytes; at most {MAX_IMAGE_BYTES} are allowed: send a smaller one"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return np.frombuffer(file.read(MAX_IMAGE_BYTES + 1), dtype=np.uint8)
    except OSError as error:
        raise InvalidRequestError(f"the file of an image cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
