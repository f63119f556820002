"""`StepParts`: which hidden states a step computes for its parts, and where the readers find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.interface.pooling import PoolingPart
from inflight.models.causal_lm import ModelStep
from inflight.worker.parts.reader import Found, PartReader, PartWork
from inflight.worker.parts.row_parts import StepParts

HIDDEN = torch.arange(20.0).unsqueeze(1)  # of 20 tokens: the hidden state is the token's index


class Reader(PartReader):
    def __init__(self, *, reads_hidden: bool = True) -> None:
        super().__init__()
        self.reads_hidden = reads_hidden

    def prepare(self, plan: Any, inputs: Any, batch: Any) -> list[PartWork]:
        return []

    def read(self, hidden: Tensor, work: PartWork, arrays: Sequence[Tensor], model: Any) -> Found:
        return [(hidden[work.first_token : work.first_token + work.num_tokens],)] if self.reads_hidden else []


def work(reader: Reader, first_token: int, num_tokens: int) -> PartWork:
    part = PoolingPart(pooling_type="LAST")
    return PartWork(reader=reader, part=part, row=0, slot=0, first_token=first_token, start=0, num_tokens=num_tokens)


@pytest.mark.parametrize("num_draws", [0, 2])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 4, 1)])
def test_readers_find_their_tokens(num_draws: int, lengths: tuple[int, ...]) -> None:
    hidden_reader, other = Reader(), Reader(reads_hidden=False)
    places = [3, 7, 19]
    parts = StepParts(
        [work(other, 0, 9), *(work(hidden_reader, place, count) for place, count in zip(places, lengths, strict=True))]
    )
    parts.upload(torch.from_numpy)
    draws = torch.tensor([5, 9][:num_draws], dtype=torch.int64)
    step = parts.extend(ModelStep(torch.zeros(20), torch.zeros(20), (), draws))
    if lengths == (1, 1, 1):  # only these, behind those that the draws need
        assert step.rows is not None and step.rows.tolist() == [*draws.tolist(), *places]
        hidden = HIDDEN[step.rows]
    else:
        assert step.rows is None
        hidden = HIDDEN
    parts.read(hidden, None)  # type: ignore[arg-type]
    found = [np.concatenate([piece[0].flatten().numpy() for piece in each]).tolist() for each in parts._found[1:]]
    assert found == [[place + offset for offset in range(count)] for place, count in zip(places, lengths, strict=True)]
