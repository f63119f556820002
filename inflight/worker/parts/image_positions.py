"""The positions of the tokens of a prompt with images, in models whose positions have three rows: frame, row and column.

A token of a text has three equal positions. The tokens of an image begin at the next position p: the token of frame t, row r
and column c has p + t, p + r and p + c. The text behind the image goes on at the smallest position that is larger than all of
these.
So later tokens have smaller positions than their places in the prompt (`RequestPart.rope_delta`).

Source: the multimodal rotary position embedding of Qwen2-VL (arXiv:2409.12191).
"""

import numpy as np

from inflight.interface.images import ImagesPart
from inflight.interface.request import Int32Array


def positions_of(part: ImagesPart, start: int, stop: int) -> Int32Array:
    """The positions of the tokens [start, stop) of the prompt: int32 [3, stop - start]."""
    assert part.position_merge is not None
    found = np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
    delta = 0
    for image in part.images:
        if image.start >= stop:
            break
        inside = slice(max(image.start, start) - start, max(min(image.stop, stop), start) - start)
        behind = slice(max(image.stop, start) - start, None)
        first = image.start + delta
        grid = image.merged(part.position_merge)
        if inside.start < inside.stop:
            offset = max(image.start, start) - image.start
            places = np.unravel_index(np.arange(offset, offset + inside.stop - inside.start), grid)
            found[:, inside] = np.stack(places).astype(np.int32) + first
        delta += max(grid) - image.num_tokens
        found[:, behind] = np.arange(behind.start + start, stop, dtype=np.int32) + delta
    return found
