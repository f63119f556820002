"""`ImageSettings`: which images requests may bring, and what is done with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_IMAGE_BYTES = 64 << 20  # of an image file


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """
    Attributes:
        max_images: the most images of a prompt.
        options: arguments of the image processor for all images; a request may add others (mm_processor_kwargs).
        cache_bytes: the most memory of the cache of processed images; 0: nothing is cached.
        local_path: `file:` URLs may name files in this folder; None: no files.
        domains: the names of hosts from which images may be fetched.
        num_processes: the most processes that decode and process images.
        fetch_seconds: how long the fetch of an image may take.
    """

    max_images: int
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    cache_bytes: int
    local_path: Path | None = None
    domains: frozenset[str] = frozenset()
    num_processes: int = 1
    fetch_seconds: float = 5.0
