"""`DrawnTokens`: the tokens that are written to the inputs of later steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from inflight.interface.step import TokenDelta
from inflight.worker.drawn_tokens import DrawnTokens
from tests.support.plans import new_request


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def message(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def filled(drawn: DrawnTokens, slots: list[int]) -> list[int]:
    input_ids = np.full(len(slots) + 1, 9, dtype=np.int32)
    drawn.fill(input_ids, ints(*range(1, len(slots) + 1)), ints(*slots))
    assert int(input_ids[0]) == 9
    return [int(each) for each in input_ids[1:]]


def test_the_last_token_of_a_slot_is_the_next_input() -> None:
    drawn = DrawnTokens(4, 8)
    drawn.add(ints(2, 0), ints(3, 5), message([11], [12]))
    drawn.add(ints(2), ints(4), message([13]))
    assert filled(drawn, [0, 2]) == [12, 13]


def test_the_last_of_several_tokens_and_the_drafts_behind_it() -> None:
    drawn = DrawnTokens(4, 32, num_speculative_tokens=2)
    drawn.add(ints(2, 0), ints(3, 5), message([11, 12, 13, 7, -1], [21, -1, -1, 8, 9]))
    assert filled(drawn, [0, 2]) == [21, 13]
    assert drawn.num_tokens[[2, 0]].tolist() == [6, 6]
    assert drawn.drafts[[2, 0]].tolist() == [[7, -1], [8, 9]]


def test_the_last_token_of_a_full_sequence_is_not_kept() -> None:
    drawn = DrawnTokens(2, 4)
    drawn.write(ints(0, 1), ints(4, 3), ints(5, 6))
    assert drawn.token_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 6]]


def test_whole_sequences_of_new_requests_and_forced_tokens_are_remembered() -> None:
    """A request that goes on after a preemption brings the tokens behind its prompt, too."""
    drawn = DrawnTokens(3, 6)
    resumed = replace(new_request(2, ints(5, 6, 7, 8), ints(1)), num_prompt_tokens=2)
    forced = TokenDelta(slots=ints(2, 2, 0), positions=ints(3, 4, 1), token_ids=ints(9, 10, 11))
    drawn.remember([resumed], forced)
    assert drawn.token_ids.tolist() == [[0, 11, 0, 0, 0, 0], [0] * 6, [5, 6, 7, 9, 10, 0]]
    drawn.remember([], None)
    assert drawn.token_ids[2].tolist() == [5, 6, 7, 9, 10, 0]
