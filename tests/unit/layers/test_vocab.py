"""Embedding and head: sharded or whole, tied or not, they are one lookup and one multiplication."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.layers.vocab import LogitsHead, VocabParallelEmbedding
from tests.unit.layers.contexts import layer_context

CPU = torch.device("cpu")
VOCAB_SIZE, HIDDEN_SIZE = 11, 6


class OneOfMany(TensorParallelGroup):
    """A rank whose results are left for the test to put together."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def embedding(table: torch.Tensor, tp: TensorParallelGroup) -> VocabParallelEmbedding:
    layer = VocabParallelEmbedding(VOCAB_SIZE, HIDDEN_SIZE, layer_context(table.dtype, tp))
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
        head = LogitsHead(VOCAB_SIZE, HIDDEN_SIZE, tied_embedding=tied, context=layer_context(torch.float32, tp))
        for _, slot in head.weight_slots("lm_head"):
            slot.destination.copy_(table.narrow(0, slot.start, slot.size))
        head.finish_loading()
        parts.append(head(hidden))
        columns = min(parts[-1].shape[1], VOCAB_SIZE)
        out = torch.full((3, columns), torch.nan)
        assert head(hidden, out) is out and torch.equal(out, parts[-1][:, :columns])
    logits = torch.cat(parts, dim=-1)
    torch.testing.assert_close(logits[:, :VOCAB_SIZE], F.linear(hidden, table))
    assert (logits[:, VOCAB_SIZE:] == 0).all()  # padding, which the real gather's caller cuts off


@pytest.mark.parametrize("size", [2, 3])
def test_the_gathered_logits_end_with_the_vocabulary(size: int) -> None:
    class AllRanks(OneOfMany):
        """Its gathering returns the parts of all ranks, which the test has computed before."""

        parts: list[torch.Tensor]

        def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
            self.parts.append(x)
            return torch.cat(self.parts, dim)

    table, hidden = torch.randn(VOCAB_SIZE, HIDDEN_SIZE), torch.randn(3, HIDDEN_SIZE)
    AllRanks.parts = []
    for rank in range(size):
        tp = AllRanks(size, rank)
        context = layer_context(torch.float32, tp)
        head = LogitsHead(VOCAB_SIZE, HIDDEN_SIZE, tied_embedding=embedding(table, tp), context=context)
        head.finish_loading()
        logits = head(hidden)
    assert logits.shape == (3, VOCAB_SIZE) and logits.is_contiguous()
    torch.testing.assert_close(logits, F.linear(hidden, table))


def test_logits_are_float32_and_the_tied_table_stays() -> None:
    table = torch.randn(VOCAB_SIZE, HIDDEN_SIZE).bfloat16()
    alone = TensorParallelGroup()
    tied = embedding(table, alone)
    head = LogitsHead(VOCAB_SIZE, HIDDEN_SIZE, tied_embedding=tied, context=layer_context(torch.bfloat16, alone))
    assert list(head.weight_slots("lm_head")) == []
    head.finish_loading()
    hidden = torch.randn(1, HIDDEN_SIZE).bfloat16()
    logits = head(hidden)
    assert logits.dtype == torch.float32
    assert logits.shape == (1, VOCAB_SIZE)
    torch.testing.assert_close(logits, F.linear(hidden.float(), table.float()), rtol=2**-7, atol=1e-2)
    assert torch.equal(tied(torch.arange(VOCAB_SIZE)), table)


def test_a_head_that_is_stored_quantized_stays_so() -> None:
    scales = torch.rand(VOCAB_SIZE, 1) + 0.5
    values = torch.randint(-127, 128, (VOCAB_SIZE, 64), dtype=torch.int8)
    weight = QuantizedWeight(values=values, scales=scales, offsets=None, bits=8)
    head = LogitsHead(VOCAB_SIZE, 64, tied_embedding=None, context=layer_context(torch.float32, TensorParallelGroup()))
    [(_, slot)] = head.weight_slots("lm_head")
    assert slot.accept is not None and slot.accept(weight)
    head.finish_loading()
    hidden = torch.randint(-127, 128, (3, 64)).float()
    hidden[:, 0] = 127  # a step of the activations is one: nothing is rounded
    torch.testing.assert_close(head(hidden), hidden @ weight.dequantize().T, rtol=1e-5, atol=1e-2)
