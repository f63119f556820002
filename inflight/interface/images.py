"""`ImagesPart`: the images of a prompt.

A vision tower makes the embeddings of an image, and they replace those of the placeholder tokens that stand for it in the
prompt. The pixels do not go to the ranks with the request, but with the first step that computes something of them: several
requests, and all turns of a conversation, may have the same image.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Literal

import numpy as np

from inflight.interface.parts import Content, RequestPart
from inflight.interface.request import Float32Array

NO_PIXELS: Float32Array = np.empty(0, dtype=np.float32)


@dataclass(slots=True)
class EncoderCounts:
    """What the vision tower has done in some time. An image that is divided into tiles counts as several.

    Attributes:
        num_queries: images of requests that got a slot, except for those that the prefix cache made unnecessary.
        num_misses: how many of them had to be encoded; those that were encoded again after an eviction or a fault, too.
        num_slices: parts of layers that were planned.
        seconds: how long steps took longer because of them.
        usage: the share of the encoder cache that is in use at the end, in [0, 1].
    """

    num_queries: int = 0
    num_misses: int = 0
    num_slices: int = 0
    seconds: float = 0.0
    usage: float = 0.0

    def __add__(self, later: EncoderCounts) -> EncoderCounts:
        (*mine, _), (*others, usage) = astuple(self), astuple(later)
        total = EncoderCounts(*map(add, mine, others))
        total.usage = usage
        return total


def sum_of(earlier: EncoderCounts | None, later: EncoderCounts | None) -> EncoderCounts | None:
    """None if the model has no vision tower."""
    return earlier and later and earlier + later


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """One run of consecutive placeholder tokens of a prompt, and what the vision tower computes their embeddings from. An image
    that its processor divides into tiles is several of these.

    Attributes:
        start: the position of its first placeholder in the prompt.
        num_tokens: how many placeholders it has.
        digest: the SHA-256 of the pixels (dtype, shape, bytes) and of the grid. Images with equal digests have equal
            embeddings.
        pixels: as transformers' processor of the family returns them; empty in the copy that a rank gets with its request.
        grid: (frames, rows, columns) of patches, before any merging.
        place: what errors call the image; "" for none.
    """

    start: int
    num_tokens: int
    digest: bytes
    pixels: Float32Array
    grid: tuple[int, int, int]
    place: str = ""

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    def merged(self, merge: int) -> tuple[int, int, int]:
        """(frames, rows, columns) of the tokens, if `merge` rows and columns of patches become one."""
        frames, rows, columns = self.grid
        return frames, rows // merge, columns // merge


@dataclass(frozen=True, kw_only=True)
class ImagesPart(RequestPart):
    """
    Attributes:
        images: in the order of their positions. They do not overlap.
        position_merge: in a model whose positions have three rows, how many rows and columns of patches become one token; None:
            tokens of images have positions like all others.
    """

    kind: Literal["images"] = "images"
    images: tuple[ImageInput, ...]
    position_merge: int | None = None

    @property
    def contents(self) -> tuple[Content, ...]:
        return tuple(Content(each.start, each.stop, each.digest) for each in self.images)

    @property
    def rope_delta(self) -> int:
        if self.position_merge is None:
            return 0
        return sum(max(each.merged(self.position_merge)) - each.num_tokens for each in self.images)

    def for_ranks(self) -> ImagesPart:
        return replace(self, images=tuple(replace(each, pixels=NO_PIXELS) for each in self.images))
