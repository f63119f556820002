"""Which positions a drafter that reads hidden states computes in a step, with which tokens and hidden states."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from inflight.spec_decode.hidden_state_drafter import STEPS_BETWEEN_PROBES, HiddenStateDrafter
from inflight.spec_decode.model_drafter import NOTHING, DraftInputs
from tests.support.plans import ints

MAX_MODEL_LEN = 12


def drafter(
    num_steps: int = 0, *, block_size: int = 4, max_model_len: int = MAX_MODEL_LEN, has_time: bool = True
) -> Any:
    """Any: it has no model. `_forward` returns its arguments."""
    found: Any = object.__new__(HiddenStateDrafter)
    found._num_steps, found._num_tokens = num_steps, ints(0, 7, 12)
    found._num_waiting, found._waiting, found._block_size = ints(0, 0, 0), {}, block_size
    found.config = mock.Mock(max_model_len=max_model_len)
    found._device, found.model, found.choice = mock.Mock(), mock.Mock(), mock.Mock()
    found._device.to_device = torch.from_numpy
    found._forward = lambda *arguments: arguments
    found.model.read_hidden = lambda hidden: hidden
    found.choice.spend_on = lambda num_tokens: has_time
    found.choice.costs.is_measured = True
    return found


def step() -> DraftInputs:
    """A prompt in the middle; a request whose three drafts were verified, of which one was right; a request that is as long as
    it can be, with its last token drawn."""
    return DraftInputs(
        token_ids=np.arange(36, dtype=np.int32).reshape(3, MAX_MODEL_LEN),
        slots=ints(0, 1, 2),
        num_computed_tokens=ints(2, 4, 10),
        num_tokens=ints(6, 7, 12),
        drawing_rows=np.array([1, 2]),
        sampling=mock.Mock(),
        block_tables=(),
        hidden=torch.arange(9.0)[:, None],
        query_start_loc=ints(0, 4, 8, 9),
    )


@pytest.mark.parametrize("is_probe", [False, True])
def test_each_position_gets_the_next_token(is_probe: bool) -> None:
    found = drafter(STEPS_BETWEEN_PROBES - 1 if is_probe else 0, block_size=1)
    counts = ints(0, 0) if is_probe else ints(3, 0)
    places, arguments = found._compute_step(step(), counts, mock.Mock())
    tokens, _, rows, starts, ends, last, hidden = arguments
    assert tokens.tolist() == [3, 4, 5, 6, 12 + 5, 12 + 6, 24 + 11]
    assert (rows.tolist(), starts.tolist(), ends.tolist()) == ([0, 1, 2], [2, 4, 10], [6, 6, 11])
    assert hidden[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 8]  # those of drafts that were refused are left out
    assert (places.tolist(), last.tolist()) == ([0], [5])


def test_a_step_that_tells_nothing_new() -> None:
    """A request that was to end draws nothing more."""
    ended = step()._replace(num_tokens=ints(2, 5, 11), slots=ints(0, 1, 2), drawing_rows=np.array([0, 1, 2]))
    found = drafter(block_size=1)
    ended = ended._replace(num_computed_tokens=ints(2, 4, 10))
    places, passed = found._compute_step(ended, ints(3, 3, 3), mock.Mock())
    assert passed is NOTHING
    assert not len(places)


def test_requests_without_drafts_wait_until_a_block_is_full() -> None:
    found = drafter()
    places, arguments = found._compute_step(step(), ints(0, 0), mock.Mock())
    assert arguments[2].tolist() == [0]  # the positions [2, 6) fill a block of 4
    assert not len(places)
    assert found._num_waiting.tolist() == [0, 2, 1]
    assert found._num_behind(step()).tolist() == [2, 1]


def test_a_probe_needs_time_for_trials() -> None:
    found = drafter(STEPS_BETWEEN_PROBES - 1, has_time=False)
    assert not len(found._compute_step(step(), ints(0, 0), mock.Mock())[0])


def test_a_new_request_does_not_get_the_hidden_states_of_an_older_one() -> None:
    found = drafter()
    found._drawn, found._acceptance = np.zeros((3, 2), dtype=np.int32), mock.Mock()
    found._compute_step(step(), ints(0, 0), mock.Mock())
    found.begin([mock.Mock(slot=1)])
    assert found._num_waiting.tolist() == [0, 0, 1]
    assert list(found._waiting) == [2]


@pytest.mark.parametrize(("block_size", "num_requests"), [(4, 3), (1000, 3), (1000, 40)])
def test_every_position_is_computed_once(block_size: int, num_requests: int) -> None:
    """Whatever the numbers of drafts, and of those that are right."""
    length, chance = 300, random.Random(0)
    found = drafter(block_size=block_size, max_model_len=length, has_time=False)
    found._num_waiting = np.zeros(num_requests, dtype=np.int32)
    found._num_tokens = np.zeros(num_requests, dtype=np.int32)
    token_ids = np.arange(num_requests * length, dtype=np.int32).reshape(num_requests, length)
    computed = [0] * num_requests  # by the served model
    done = [0] * num_requests  # by the drafter
    counts = [0] * num_requests
    passes = 0
    while min(computed) < 200:
        lengths = [
            1 + count if place else 1 + chance.randrange(9) for place, count in zip(computed, counts, strict=True)
        ]
        loc = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        # the hidden state of a position is its token
        hidden = [token_ids[row, computed[row] : computed[row] + lengths[row]] for row in range(num_requests)]
        known = [
            place + (chance.randint(1, length_) if place else length_) + (place == 0)
            for place, length_ in zip(computed, lengths, strict=True)
        ]
        inputs = DraftInputs(
            token_ids=token_ids,
            slots=np.arange(num_requests, dtype=np.int32),
            num_computed_tokens=ints(*computed),
            num_tokens=ints(*known) + ints(*(place > 0 for place in computed)),
            drawing_rows=np.arange(num_requests),
            sampling=mock.Mock(),
            block_tables=(),
            hidden=torch.from_numpy(np.concatenate(hidden)).float()[:, None],
            query_start_loc=loc,
        )
        counts = [chance.choice([0] * 30 + [3]) for _ in range(num_requests)]
        places, passed = found._compute_step(inputs, ints(*counts), mock.Mock())
        assert places.tolist() == np.flatnonzero(counts).tolist()
        if passed is not NOTHING:
            passes += 1
            tokens, _, rows, starts, ends, last, states = passed
            expected = [token_ids[row, start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
            assert states[:, 0].tolist() == np.concatenate(expected).tolist()
            assert tokens.tolist() == (np.concatenate(expected) + 1).tolist()
            assert [done[row] for row in rows] == starts.tolist()
            for row, end in zip(rows, ends, strict=True):
                done[row] = end
            assert tokens[last].tolist() == [token_ids[row, done[row]] for row in np.flatnonzero(counts)]
        computed = (inputs.num_tokens - 1).tolist()
        assert all(begin // block_size == end // block_size for begin, end in zip(done, computed, strict=True))
        assert sum(computed) - sum(done) < 512
        assert max(end - begin for begin, end in zip(done, computed, strict=True)) < 32
    assert passes < 200
