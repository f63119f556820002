"""Which positions a drafter that reads hidden states computes in a step, with which tokens and hidden states."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from inflight.spec_decode.hidden_state_drafter import STEPS_BETWEEN_PROBES, HiddenStateDrafter
from inflight.spec_decode.model_drafter import NOTHING, DraftInputs
from tests.support.plans import ints

MAX_MODEL_LEN = 12


def drafter(num_steps: int = 0) -> Any:
    """Any: it has no model. `_forward` returns its arguments."""
    found: Any = mock.Mock(_num_steps=num_steps, _num_tokens=ints(0, 7, 12))
    found.config.max_model_len = MAX_MODEL_LEN
    found._device.to_device = torch.from_numpy
    found._forward = lambda *arguments: arguments
    found.model.read_hidden = lambda hidden: hidden
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
    found = drafter(STEPS_BETWEEN_PROBES - 1 if is_probe else 0)
    counts = ints(0, 0) if is_probe else ints(3, 0)
    places, arguments = HiddenStateDrafter._compute_step(found, step(), counts, mock.Mock())
    tokens, _, rows, starts, ends, last, hidden = arguments
    assert tokens.tolist() == [3, 4, 5, 6, 12 + 5, 12 + 6, 24 + 11]
    assert (rows.tolist(), starts.tolist(), ends.tolist()) == ([0, 1, 2], [2, 4, 10], [6, 6, 11])
    assert hidden[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 8]  # those of drafts that were refused are left out
    assert (places.tolist(), last.tolist()) == ([0], [5])


def test_a_step_that_tells_nothing_new() -> None:
    """A request that was to end draws nothing more."""
    ended = step()._replace(num_tokens=ints(2, 5, 11), slots=ints(0, 1, 2), drawing_rows=np.array([0, 1, 2]))
    found = drafter()
    ended = ended._replace(num_computed_tokens=ints(2, 4, 10))
    places, passed = HiddenStateDrafter._compute_step(found, ended, ints(3, 3, 3), mock.Mock())
    assert passed is NOTHING
    assert not len(places)
