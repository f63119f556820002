"""Reductions over the vocabulary, against whole rows. test_candidates.py tests windows, and test_draw.py the largest value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.sample.reductions import CHUNK_ELEMENTS, row_chunks, softmax_mass, top_tokens


def drawn(num_rows: int, vocab_size: int, *, num_values: int | None = None) -> Tensor:
    """`num_values`: so few different logits that many are equal."""
    generator = torch.Generator().manual_seed(vocab_size)
    if num_values is None:
        return torch.randn(num_rows, vocab_size, generator=generator)
    return torch.randint(-num_values, num_values, (num_rows, vocab_size), generator=generator).float()


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((5, CHUNK_ELEMENTS // 2), [2, 2, 1]),
        ((2, CHUNK_ELEMENTS // 2 + 1), [1, 1]),
        ((2, 3 * CHUNK_ELEMENTS), [1, 1]),
        ((3, 4), [3]),
        ((0, 4), []),
    ],
)
def test_as_many_rows_at_a_time_as_fit_the_cache(shape: tuple[int, int], sizes: list[int]) -> None:
    values = torch.empty(1, 1).expand(shape)
    found = list(row_chunks(values))
    assert [part.stop - part.start for part in found] == sizes
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(shape[0]))


def test_the_sum_of_a_softmax() -> None:
    logits = drawn(3, CHUNK_ELEMENTS // 2)
    truth = (logits.double() - logits.double().amax(1, keepdim=True)).exp().sum(1, keepdim=True)
    torch.testing.assert_close(softmax_mass(logits).double(), truth, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (5, 5), (50, 3), (50, 49), (1000, 7), (CHUNK_ELEMENTS // 2, 2)])
@pytest.mark.parametrize("num_values", [None, 3])
def test_of_equal_tokens_the_first_ones_are_taken(vocab_size: int, k: int, num_values: int | None) -> None:
    logits = drawn(5, vocab_size, num_values=num_values)
    values, ids = top_tokens(logits, k)
    wanted = torch.sort(logits, dim=1, descending=True, stable=True)
    assert torch.equal(values, wanted.values[:, :k]) and torch.equal(ids, wanted.indices[:, :k])
