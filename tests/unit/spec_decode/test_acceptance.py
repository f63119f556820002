"""How often drafts were right, by request."""

from __future__ import annotations

import numpy as np

from inflight.spec_decode.acceptance import Acceptance
from tests.support.plans import ints


def test_a_request_is_known_by_its_own_drafts_and_a_new_one_by_those_of_all() -> None:
    acceptance = Acceptance(max_num_seqs=3)
    first = acceptance.probabilities(ints(0, 1, 2))
    assert first[0] == first[1] == first[2] > 0.9
    for _ in range(20):
        acceptance.add(ints(0, 2), np.array([3, 0]), np.array([3, 1]))
    good, new, bad = acceptance.probabilities(ints(0, 1, 2))
    assert good > 0.9 > new > 0.5 > 0.3 > bad
    acceptance.forget([2])
    assert acceptance.probabilities(ints(2)) == [new]
    acceptance.add(ints(1, 1, 1), np.array([True, False, True]), np.ones(3, dtype=np.int64))
    assert acceptance.probabilities(ints(1))[0] < new
