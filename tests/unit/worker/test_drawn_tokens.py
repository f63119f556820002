"""`DrawnTokens`: what is put into later steps' inputs, with and without another stage."""

from __future__ import annotations

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


def filled(drawn: DrawnTokens, slots: list[int], step_id: int) -> list[int]:
    input_ids = torch.full((len(slots) + 1,), 9, dtype=torch.int32)
    drawn.fill(input_ids, torch.arange(len(slots)) + 1, torch.tensor(slots), step_id)
    assert int(input_ids[0]) == 9
    return input_ids[1:].tolist()


def test_the_last_token_of_a_slot_is_the_next_input() -> None:
    drawn = DrawnTokens(4, 8, CPU)
    drawn.add(ints(2, 0), ints(3, 5), torch.tensor([11, 12], dtype=torch.int32))
    drawn.add(ints(2), ints(4), torch.tensor([13], dtype=torch.int32))
    assert filled(drawn, [0, 2], 1) == [12, 13]
    assert drawn.token_ids[2, 3:5].tolist() == [11, 13]


def test_a_token_that_could_not_be_drawn_is_a_valid_input() -> None:
    """Its request fails, but a step under way may hold it, beside others."""
    drawn = DrawnTokens(2, 8, CPU)
    drawn.add(ints(0, 1), ints(3, 3), torch.tensor([-1, 7], dtype=torch.int32))
    assert filled(drawn, [0, 1], 0) == [0, 7]
    assert drawn.token_ids.min() == 0


def test_the_last_token_of_a_full_sequence_is_not_kept() -> None:
    drawn = DrawnTokens(2, 4, CPU)
    drawn.add(ints(0, 1), ints(4, 3), torch.tensor([5, 6], dtype=torch.int32))
    assert drawn.token_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 6]]


def test_the_first_stage_waits_for_the_step_that_draws_and_for_no_later_one() -> None:
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds=0.2)
    sender, receiver = TokenSender(worlds.of(1).channel(0, "tokens")), TokenReceiver(worlds.of(0).channel(1, "tokens"))
    last, first = DrawnTokens(4, 8, CPU, sender=sender), DrawnTokens(4, 8, CPU, receiver=receiver)
    for step_id, slots in enumerate(([0, 1], [], [1], [0])):
        first.expect(step_id, ints(*slots))
    last.add(ints(0, 1), ints(1, 1), torch.tensor([21, -1], dtype=torch.int32))
    assert filled(first, [0, 1], 0) == [21, 0]
    last.add(ints(1), ints(2), torch.tensor([23], dtype=torch.int32))
    assert filled(first, [1, 0], 2) == [23, 21]
    with pytest.raises(TimeoutError):
        filled(first, [0], 3)
    worlds.close("the test is over")
    sender.close()
    receiver.close()


def test_tokens_that_nobody_asks_for_do_not_pile_up() -> None:
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds=5)
    sender, receiver = TokenSender(worlds.of(1).channel(0, "tokens")), TokenReceiver(worlds.of(0).channel(1, "tokens"))
    first = DrawnTokens(4, 8, CPU, receiver=receiver)
    for step_id in range(50):
        first.expect(step_id, ints(0))
        sender.send(torch.tensor([step_id], dtype=torch.int32))
    sender.send(torch.tensor([50], dtype=torch.int32))
    receiver.post(1).result(timeout=5)  # behind all others
    assert filled(first, [], -1) == []
    assert len(first._expected) == 0
    worlds.close("the test is over")
    sender.close()
    receiver.close()
