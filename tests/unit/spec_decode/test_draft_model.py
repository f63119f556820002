"""What a draft model learns from the drafts that a step has verified."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from inflight.spec_decode.draft_model import DraftModel
from inflight.spec_decode.proposer import NO_TOKEN
from tests.support.plans import ints


def test_each_draft_is_counted_once() -> None:
    """A request gets drafts in one step, and none in the next two: only the first of these can tell whether they were right."""
    counted: list[tuple[list[int], list[int]]] = []
    model: Any = mock.Mock(num_speculative_tokens=3)
    model._acceptance.add_all = lambda slots, right, compared: counted.append((right.tolist(), compared.tolist()))
    model._num_tokens = ints(0, 4)
    model._drawn = np.array([[NO_TOKEN] * 3, [7, 8, 9]], dtype=np.int32)
    token_ids = np.array([[0] * 12, [1, 2, 3, 4, 7, 8, 5, 6, 6, 0, 0, 0]], dtype=np.int32)
    for num_tokens in (7, 8, 9):
        DraftModel._learn(model, ints(1), token_ids, ints(num_tokens))
        model._num_tokens[1] = num_tokens
    assert counted == [([2], [3]), ([0], [0]), ([0], [0])]
