"""How far the tokens of a prompt with images see, in models whose layers see whole images."""

from __future__ import annotations

import pytest

from inflight.interface.images import NO_PIXELS, ImageInput, ImagesPart
from inflight.worker.parts.images import ends_of


def part(*spans: tuple[int, int]) -> ImagesPart:
    return ImagesPart(
        images=tuple(
            ImageInput(start=start, num_tokens=stop - start, digest=b"", pixels=NO_PIXELS, grid=(1, 1, 1))
            for start, stop in spans
        )
    )


@pytest.mark.parametrize(
    ("start", "stop", "ends"),
    [
        (0, 3, None),
        (0, 6, [1, 2, 3, 6, 6, 6]),
        (3, 8, [6, 6, 6, 7, 8]),
        (5, 8, [6, 7, 8]),  # the first tokens of the image are in cached blocks
        (6, 9, None),
        (2, 12, [3, 6, 6, 6, 7, 8, 9, 12, 12, 12]),
        (13, 14, None),
    ],
)
def test_tokens_see_up_to_the_end_of_their_image(start: int, stop: int, ends: list[int] | None) -> None:
    found = ends_of(part((3, 6), (9, 12)), start, stop)
    assert (None if found is None else found.tolist()) == ends


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (5, 11), (3, 5)])
def test_an_image_that_is_cut_is_refused(start: int, stop: int) -> None:
    with pytest.raises(AssertionError):
        ends_of(part((3, 6), (9, 12)), start, stop)
