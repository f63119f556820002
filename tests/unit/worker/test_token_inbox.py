"""`TokenInbox`: the drawn tokens of the last stage arrive at the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from inflight.config.ranks import RankLayout
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.token_link import TokenReceiver, TokenSender
from inflight.worker.drawn_tokens import DrawnTokens
from inflight.worker.token_inbox import TokenInbox
from tests.support.enough_time import with_enough_time


class FirstStage:
    def __init__(self, receiver: TokenReceiver) -> None:
        self.receiver = receiver
        self.drawn = DrawnTokens(4, 8)
        self.inbox = TokenInbox(receiver, self.drawn.apply)

    def expect(self, step_id: int, slots: list[int]) -> None:
        if slots:
            self.inbox.expect(step_id, ints(*slots), ints(*slots), self.inbox.post(len(slots)))

    def filled(self, slots: list[int], step_id: int) -> list[int]:
        input_ids = np.zeros(len(slots), dtype=np.int32)
        self.inbox.receive(step_id)
        self.drawn.fill(input_ids, ints(*range(len(slots))), ints(*slots))
        return [int(each) for each in input_ids]


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def message(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@contextmanager
def stages(timeout_seconds: float = 300.0) -> Iterator[tuple[DrawnTokens, FirstStage]]:
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds)
    sender, receiver = TokenSender(worlds.of(1).channel(0, "tokens")), TokenReceiver(worlds.of(0).channel(1, "tokens"))
    try:
        yield DrawnTokens(4, 8, senders=[sender]), FirstStage(receiver)
    finally:
        worlds.close("the test is over")
        sender.close()
        receiver.close()


def test_the_first_stage_waits_for_the_step_that_draws_and_for_no_later_one() -> None:
    def check(seconds: float) -> None:
        with stages(seconds) as (last, first):
            for step_id, slots in enumerate(([0, 1], [], [1], [0])):
                first.expect(step_id, slots)
            last.add(ints(0, 1), ints(1, 1), message([21], [0]))
            assert first.filled([0, 1], 0) == [21, 0]
            last.add(ints(1), ints(2), message([23]))
            assert first.filled([1, 0], 2) == [23, 21]
            with pytest.raises(TimeoutError):
                first.filled([0], 3)

    with_enough_time(check)


def test_tokens_that_nobody_asks_for_do_not_pile_up() -> None:
    with stages() as (last, first):
        for step_id in range(50):
            first.expect(step_id, [0])
            last.add(ints(0), ints(0), message([step_id]))
        last.add(ints(0), ints(0), message([50]))
        first.receiver.post(1).result(timeout=300)  # behind all others
        assert first.filled([], -1) == []
        assert len(first.inbox._expected) == 0
