"""`DrawnTokens`: what is put into later steps' inputs, with and without another stage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inflight.config.ranks import RankLayout
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.token_link import TokenReceiver, TokenSender
from inflight.worker.drawn_tokens import DrawnTokens

CPU = torch.device("cpu")


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def message(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def filled(drawn: DrawnTokens, slots: list[int], step_id: int) -> list[int]:
    input_ids = torch.full((len(slots) + 1,), 9, dtype=torch.int32)
    drawn.receive(step_id)
    drawn.fill(input_ids, torch.arange(len(slots)) + 1, torch.tensor(slots))
    assert int(input_ids[0]) == 9
    return input_ids[1:].tolist()


def test_the_last_token_of_a_slot_is_the_next_input() -> None:
    drawn = DrawnTokens(4, 8, CPU)
    drawn.add(ints(2, 0), ints(3, 5), message([11], [12]))
    drawn.add(ints(2), ints(4), message([13]))
    assert filled(drawn, [0, 2], 1) == [12, 13]


def test_the_last_of_several_tokens_and_the_drafts_behind_it() -> None:
    drawn = DrawnTokens(4, 32, CPU, num_speculative_tokens=2)
    drawn.add(ints(2, 0), ints(3, 5), message([11, 12, 13, 7, -1], [21, -1, -1, 8, 9]))
    assert filled(drawn, [0, 2], 1) == [21, 13]
    assert drawn.num_tokens[[2, 0]].tolist() == [6, 6]
    assert drawn.drafts[[2, 0]].tolist() == [[7, -1], [8, 9]]


def test_the_last_token_of_a_full_sequence_is_not_kept() -> None:
    drawn = DrawnTokens(2, 4, CPU)
    drawn.write(ints(0, 1), ints(4, 3), ints(5, 6))
    assert drawn.token_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 6]]


@pytest.fixture
def stages() -> Iterator[tuple[DrawnTokens, DrawnTokens, TokenReceiver]]:
    """The last one, the first one, and its receiver."""
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds=0.2)
    sender, receiver = TokenSender(worlds.of(1).channel(0, "tokens")), TokenReceiver(worlds.of(0).channel(1, "tokens"))
    yield DrawnTokens(4, 8, CPU, senders=[sender]), DrawnTokens(4, 8, CPU, receiver=receiver), receiver
    worlds.close("the test is over")
    sender.close()
    receiver.close()


def expect(drawn: DrawnTokens, step_id: int, slots: list[int]) -> None:
    drawn.expect(step_id, ints(*slots), ints(*slots), drawn.post(len(slots)))


def test_the_first_stage_waits_for_the_step_that_draws_and_for_no_later_one(
    stages: tuple[DrawnTokens, DrawnTokens, TokenReceiver],
) -> None:
    last, first, _ = stages
    for step_id, slots in enumerate(([0, 1], [], [1], [0])):
        expect(first, step_id, slots)
    last.add(ints(0, 1), ints(1, 1), message([21], [0]))
    assert filled(first, [0, 1], 0) == [21, 0]
    last.add(ints(1), ints(2), message([23]))
    assert filled(first, [1, 0], 2) == [23, 21]
    with pytest.raises(TimeoutError):
        filled(first, [0], 3)


def test_tokens_that_nobody_asks_for_do_not_pile_up(stages: tuple[DrawnTokens, DrawnTokens, TokenReceiver]) -> None:
    last, first, receiver = stages
    for step_id in range(50):
        expect(first, step_id, [0])
        last.add(ints(0), ints(0), message([step_id]))
    last.add(ints(0), ints(0), message([50]))
    receiver.post(1).result(timeout=5)  # behind all others
    assert filled(first, [], -1) == []
    assert len(first._expected) == 0
