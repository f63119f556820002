"""`ProcessedImage`: an image as the processor of its model has prepared it, and the text that stands for it in a prompt."""

import hashlib
from dataclasses import dataclass

import numpy as np

from inflight.interface.request import Float32Array

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedInput:
    """One input of the vision tower. An image that its processor divides into tiles has several.

    Attributes:
        pixels: as transformers' processor of the family returns them: [3, height, width], or [num_patches, patch_features]. For
            a tower of transformers all that its processor returns (interface/packed_arrays.py).
        grid: (frames, rows, columns) of patches, before any merging.
        num_tokens: how many consecutive tokens of the prompt stand for it.
        token_ids: these tokens, if not all of them are the placeholder: a tower of transformers also makes the embeddings of
            those between them, such as the ends of rows.
        digest: the SHA-256 of the pixels and the grid (`digest_of`).
    """

    pixels: Float32Array
    grid: Grid
    num_tokens: int
    digest: bytes
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """
    Attributes:
        placeholder: the text that stands for an image in a prompt before it is expanded, such as "<image>".
        expansion: the text that replaces one placeholder.
        inputs: in the order of their tokens in the expansion.
        place: what errors call the image, in the prompt that it was processed for.
        border: the token at both ends of the expansion, if images behind each other share it, and a space follows it before a
            word (Idefics2); "" if there is none.
    """

    placeholder: str
    expansion: str
    inputs: tuple[ProcessedInput, ...]
    place: str = ""
    border: str = ""

    @property
    def num_bytes(self) -> int:
        """The memory that the image needs, about."""
        return len(self.expansion) + sum(each.pixels.nbytes for each in self.inputs)


def digest_of(pixels: Float32Array, grid: Grid) -> bytes:
    """Inputs with equal digests have equal embeddings."""
    digest = hashlib.sha256(f"{pixels.dtype.str} {pixels.shape} {grid}\n".encode())
    digest.update(np.ascontiguousarray(pixels).reshape(-1).view(np.uint8).data)
    return digest.digest()
