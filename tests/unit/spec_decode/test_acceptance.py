"""How often drafts were right, by request."""

from __future__ import annotations

import numpy as np

from inflight.spec_decode.acceptance import Acceptance
from tests.support.plans import ints


def test_a_request_is_known_by_its_own_drafts_and_a_new_one_by_those_of_all() -> None:
    acceptance = Acceptance(right=8.0, compared=8.0)
    assert {acceptance.probability(slot) for slot in range(3)} == {1.0}
    for _ in range(20):
        acceptance.add_all(ints(0, 2), np.array([3, 0]), np.array([3, 1]))
    good, new, bad = (acceptance.probability(slot) for slot in range(3))
    assert good > 0.9 > new > 0.5 > 0.3 > bad
    acceptance.forget([2])
    assert acceptance.probability(2) == new
    acceptance.add_all(ints(1, 1, 1), np.array([True, False, True]), np.ones(3, dtype=np.int64))
    assert acceptance.probability(1) < new


def test_kinds_are_counted_apart() -> None:
    acceptance = Acceptance(right=1.0, compared=2.0, num_kinds=2)
    for _ in range(20):
        acceptance.add(0, 0, 1, kind=1)
    assert acceptance.probability(0, 0) == acceptance.probability(1, 0) == 0.5
    assert acceptance.probability(0, 1) < acceptance.probability(1, 1) < 0.5
