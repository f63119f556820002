"""Processed images whose expansion is one "@" for each token, and the token ids of texts with them."""

from __future__ import annotations

import numpy as np

from inflight.multimodal.processed import ProcessedImage, ProcessedInput

IMAGE = 999  # the token of images; other characters are tokens with their own number


def image_of(*counts: int, digest: bytes = bytes(32)) -> ProcessedImage:
    inputs = tuple(
        ProcessedInput(
            pixels=np.zeros((count, 2), dtype=np.float32), grid=(1, 1, count), num_tokens=count, digest=digest
        )
        for count in counts
    )
    return ProcessedImage(
        placeholder="@", expansion="[" + "|".join("@" * count for count in counts) + "]", inputs=inputs
    )


def encode(text: str) -> list[int]:
    return [IMAGE if character == "@" else ord(character) for character in text]
