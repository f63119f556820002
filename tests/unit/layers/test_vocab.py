"""Embedding and head: sharded or whole, tied or not, they are one lookup and one multiplication."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.embedding import VocabParallelEmbedding
from inflight.layers.logits import LogitsHead

CPU = torch.device("cpu")
VOCAB_SIZE, HIDDEN_SIZE = 11, 6


class OneOfMany(TensorParallelGroup):
    """A rank whose results are left for the test to put together."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def embedding(table: torch.Tensor, tp: TensorParallelGroup) -> VocabParallelEmbedding:
    layer = VocabParallelEmbedding(VOCAB_SIZE, HIDDEN_SIZE, dtype=table.dtype, device=CPU, tp=tp)
    [(name, slot)] = layer.weight_slots("embed")
    assert name == "embed.weight"
    assert slot.shape == table.shape
    slot.destination.copy_(table.narrow(0, slot.start, slot.size))
    layer.finish_loading()
    return layer


@pytest.mark.parametrize("size", [1, 2, 3, 8])  # 11 rows over 8 ranks: two each, and the last two ranks have none
def test_the_ranks_of_an_embedding_add_up(size: int) -> None:
    table = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    ids = torch.tensor([0, 10, 5, 5, 3], dtype=torch.int32)
    total = torch.stack([embedding(table, OneOfMany(size, rank))(ids) for rank in range(size)]).sum(0)
    assert torch.equal(total, table[ids])


def test_the_looked_up_rows_are_a_copy() -> None:
    table = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    layer = embedding(table, TensorParallelGroup())
    layer(torch.tensor([1])).zero_()
    assert torch.equal(layer.weight, table)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_ranks_of_a_head_stand_side_by_side(size: int, is_tied: bool) -> None:
    table, hidden = torch.randn(VOCAB_SIZE, HIDDEN_SIZE), torch.randn(3, HIDDEN_SIZE)
    parts = []
    for rank in range(size):
        tp = OneOfMany(size, rank)
        tied = embedding(table, tp) if is_tied else None
        head = LogitsHead(VOCAB_SIZE, HIDDEN_SIZE, tied_embedding=tied, dtype=torch.float32, device=CPU, tp=tp)
        for _, slot in head.weight_slots("lm_head"):
            slot.destination.copy_(table.narrow(0, slot.start, slot.size))
        head.finish_loading()
        parts.append(head(hidden))
    logits = torch.cat(parts, dim=-1)
    torch.testing.assert_close(logits[:, :VOCAB_SIZE], F.linear(hidden, table))
    assert (logits[:, VOCAB_SIZE:] == 0).all()  # padding, which the real gather's caller cuts off


def test_logits_are_float32_and_the_tied_table_stays() -> None:
    table = torch.randn(VOCAB_SIZE, HIDDEN_SIZE).bfloat16()
    alone = TensorParallelGroup()
    tied = embedding(table, alone)
    head = LogitsHead(VOCAB_SIZE, HIDDEN_SIZE, tied_embedding=tied, dtype=torch.bfloat16, device=CPU, tp=alone)
    assert list(head.weight_slots("lm_head")) == []
    head.finish_loading()
    hidden = torch.randn(1, HIDDEN_SIZE).bfloat16()
    logits = head(hidden)
    assert logits.dtype == torch.float32
    assert logits.shape == (1, VOCAB_SIZE)
    torch.testing.assert_close(logits, F.linear(hidden.float(), table.float()), rtol=2**-7, atol=1e-2)
    assert torch.equal(tied(torch.arange(VOCAB_SIZE)), table)
