"""How far the tokens of a step see, row by row, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.attention.image_ends import ends_of_step
from inflight.attention.metadata import AttentionInputs

INPUTS = AttentionInputs(  # tokens at 4, 5, 6 of a row; none of another one; 0 to 3 of a third
    query_start_loc=np.array([0, 3, 3, 7], dtype=np.int32),
    seq_lens=np.array([7, 2, 4], dtype=np.int32),
    num_computed_tokens=np.array([4, 2, 0], dtype=np.int32),
    block_table=np.zeros((3, 1), dtype=np.int32),
)


def ends(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_other_tokens_see_themselves_only() -> None:
    first = ends_of_step(INPUTS, None, 1, ends(7))
    assert first.tolist() == [5, 7, 7, 1, 2, 3, 4]
    both = ends_of_step(INPUTS, first, 3, ends(3, 3, 3, 4))
    assert both.tolist() == [5, 7, 7, 3, 3, 3, 4] and both.dtype == np.int32
    assert first.tolist() == [5, 7, 7, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("first_token", "given"),
    [
        (0, ends(8, 8, 8)),  # the row has 7 tokens
        (3, ends(5, 5, 5, 5)),
        (0, ends(5, 5, 7)),  # the second does not see itself
        (3, ends(4, 3, 3, 4)),  # the second sees less than the first
        (0, ends(7)),  # so does the third
        (5, ends(4, 4, 4)),
        (-1, ends(5)),
    ],
)
def test_what_does_not_fit_the_step_is_refused(first_token: int, given: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        ends_of_step(INPUTS, None, first_token, given)
