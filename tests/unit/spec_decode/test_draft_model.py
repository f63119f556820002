"""What a draft model learns from the drafts that a step has verified."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

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


BLOCK = 4
MAX_MODEL_LEN = 40


class Spans:
    """A draft model without a model: which tokens would it compute? `may_pay`: of the batch; `room`: as `num_tokens_behind`."""

    def __init__(self, num_slots: int, *, may_pay: bool = True, room: int = 100, can_spend: bool = True) -> None:
        self.may_pay = may_pay
        self.model = DraftModel.__new__(DraftModel)
        self.model.config = mock.Mock(max_model_len=MAX_MODEL_LEN)
        self.model.choice = mock.Mock()
        self.model.choice.may_pay = lambda num_requests: self.may_pay
        self.model.choice.num_tokens_behind = lambda num_requests: room
        self.model.choice.spend_on = lambda num_tokens: can_spend
        self.model._block_size = BLOCK
        self.model._num_cached = ints(*[-1] * num_slots)
        self.model._has_keys = np.ones(100, dtype=np.bool_)
        self.model._builders = (mock.Mock(), None)
        other = np.zeros((num_slots, 10), dtype=np.int32)  # of a group that the draft model is not in
        self.tables = (np.arange(1, 1 + num_slots * 10, dtype=np.int32).reshape(num_slots, 10), other)
        self.counts = ints()

    def step(self, computed: list[int], known: list[int], counts: dict[int, int]) -> list[tuple[int, int]]:
        """`counts`: row -> how many drafts it should get. The rows that are missing draw nothing."""
        rows = np.array(sorted(counts), dtype=np.int32)
        inputs: Any = mock.Mock(
            slots=np.arange(len(known), dtype=np.int32),
            num_computed_tokens=ints(*computed),
            num_tokens=ints(*known),
            drawing_rows=rows,
            block_tables=self.tables,
        )
        self.counts = ints(*[counts[row] for row in rows.tolist()])
        starts, ends = self.model._spans(inputs, self.counts)
        return list(zip(starts.tolist(), ends.tolist(), strict=True))


def test_a_request_with_drafts_is_computed_in_each_step() -> None:
    spans = Spans(2)
    assert spans.step([0, 0], [6, 3], {1: 2}) == [(0, 6), (0, 3)]  # the first is a part of a prompt
    assert spans.step([6, 2], [9, 4], {0: 2, 1: 2}) == [(6, 9), (3, 4)]
    # of three drafts in the cache, one was right: the others are computed again
    assert spans.step([8, 3], [10, 8], {0: 2, 1: 2}) == [(9, 10), (4, 8)]


@pytest.mark.parametrize("may_pay", [True, False])
def test_how_far_a_request_is_behind(may_pay: bool) -> None:
    """Where drafts cannot pay, prompts are left out, so drafts would cost those of the step, too."""
    spans = Spans(2, may_pay=may_pay)
    spans.model._num_cached[:] = -1, 5
    inputs: Any = mock.Mock(slots=ints(0, 1), num_computed_tokens=ints(4, 9), num_tokens=ints(11, 10))
    inputs.drawing_rows = np.arange(2)
    assert spans.model._num_behind(inputs).tolist() == [0 if may_pay else 7, 4]


def test_a_request_without_drafts_waits_until_a_block_is_full() -> None:
    spans = Spans(1)
    assert spans.step([0], [5], {0: 0}) == [(0, 5)]
    found = [spans.step([known - 1], [known], {0: 0})[0] for known in range(6, 13)]
    assert found == [(5, 5), (5, 5), (5, 8), (8, 8), (8, 8), (8, 8), (8, 12)]
    assert spans.step([12], [13], {0: 3}) == [(12, 13)]


def test_it_waits_longer_if_no_time_for_trials_is_left() -> None:
    spans = Spans(1, can_spend=False)
    assert spans.step([0], [5], {0: 0}) == [(0, 5)]
    assert [spans.step([known - 1], [known], {0: 0})[0] for known in range(6, 30)] == [(5, 5)] * 24
    assert spans.step([29], [30], {0: 1}) == [(5, 30)]


def test_in_a_batch_that_is_too_large_nothing_is_computed_and_later_all_is() -> None:
    spans = Spans(2, may_pay=False, room=7)
    assert spans.step([0, 0], [20, 3], {1: 0}) == [(0, 0), (0, 0)]
    assert spans.step([20, 2], [21, 4], {0: 0, 1: 0}) == [(0, 0), (0, 0)]
    spans.may_pay = True
    assert spans.step([20, 3], [22, 5], {0: 2, 1: 2}) == [
        (0, 7),
        (0, 0),
    ]  # no more than 7 tokens beside those of the step
    assert spans.counts.tolist() == [0, 0]
    assert spans.step([21, 4], [23, 6], {0: 2, 1: 2}) == [(7, 14), (0, 0)]
    assert spans.step([22, 5], [24, 7], {0: 2, 1: 2}) == [(14, 21), (0, 0)]
    assert spans.step([23, 6], [25, 8], {0: 2, 1: 2}) == [(21, 25), (0, 5)]
    assert spans.counts.tolist() == [2, 0]
    assert spans.step([24, 7], [26, 9], {0: 2, 1: 2}) == [(25, 26), (5, 9)]
    assert spans.counts.tolist() == [2, 2]


def test_a_block_without_keys_is_computed_by_the_next_request_that_finds_it() -> None:
    spans = Spans(3, may_pay=False)
    assert spans.step([0], [14], {0: 0}) == [(0, 0)]
    assert np.flatnonzero(~spans.model._has_keys).tolist() == [1, 2, 3, 4]
    spans.may_pay = True
    spans.model._num_cached[1:] = -1
    spans.tables[0][1, :3] = 1, 2, 3  # two requests find blocks of the first one
    spans.tables[0][2, :3] = 40, 2, 3
    assert spans.step([13, 12, 12], [15, 13, 13], {0: 1, 1: 1, 2: 1}) == [(0, 15), (0, 13), (4, 13)]
    assert np.flatnonzero(~spans.model._has_keys).tolist() == [4, 14, 24]  # these blocks are not full
    spans.model._num_cached[:] = -1
    assert spans.step([12, 12, 12], [13, 13, 13], {0: 1, 1: 1, 2: 1}) == [(12, 13)] * 3
