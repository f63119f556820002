"""Draws: distributed as softmax, and a pure function of logits, seed and position."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.sample.draw import largest_of_rows
from inflight.sampling_params import SamplingParams
from tests.unit.sample.batch import GREEDY, Row, sample, tokens_of

# The 99.99 % quantile of chi-square by degrees of freedom. Seeds are fixed, so a test passes or fails for good.
CHI_SQUARE = {4: 23.5, 7: 29.9, 15: 44.3, 19: 50.8, 49: 96.7}


def logits_of(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def chi_square(drawn: list[int], probabilities: Tensor) -> float:
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(drawn)
    assert counts[expected == 0].sum() == 0
    keep = expected > 0
    return float(((counts - expected) ** 2 / expected)[keep].sum())


@pytest.mark.parametrize("along", ["positions", "seeds"])
@pytest.mark.parametrize(
    ("params", "num_left"),
    [
        (SamplingParams(), 20),
        (SamplingParams(temperature=0.5), 20),
        (SamplingParams(temperature=3.0), 20),
        (SamplingParams(top_k=5), 5),
        (SamplingParams(top_k=5, temperature=2.0), 5),
        (SamplingParams(top_p=0.95), None),
        (SamplingParams(min_p=0.02, temperature=1.5), None),
    ],
)
def test_draws_follow_softmax(params: SamplingParams, num_left: int | None, along: str) -> None:
    logits = torch.linspace(-1.5, 1.5, 20).roll(7)
    n = 8_000
    rows = [
        Row(params, seed=0 if along == "positions" else i, position=i if along == "positions" else 9) for i in range(n)
    ]
    drawn = tokens_of(logits.expand(n, -1), rows)
    probabilities = torch.softmax(logits.double() / params.temperature, dim=0)
    if params.top_k > 0:
        probabilities[probabilities < probabilities.topk(params.top_k).values[-1]] = 0
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    if params.top_p < 1:
        order = probabilities.argsort(descending=True)
        before = probabilities[order].cumsum(0) - probabilities[order]
        probabilities[order[before >= params.top_p]] = 0
    left = int((probabilities > 0).sum())
    assert left == (num_left or left)
    assert left > 4
    assert chi_square(drawn, probabilities / probabilities.sum()) < CHI_SQUARE.get(left - 1, 50.8)


def test_a_large_flat_vocabulary_is_drawn_evenly() -> None:
    """50 bins of ids at V = 50,000: a poor hash would prefer some region, or repeat itself along positions."""
    n = 2000
    drawn = tokens_of(torch.zeros(n, 50_000), [Row(SamplingParams(), position=i) for i in range(n)])
    assert chi_square([token // 1000 for token in drawn], torch.full((50,), 0.02)) < CHI_SQUARE[49]
    assert len(set(drawn)) > 1920  # of 50,000: 2000 draws repeat about 40 times


def test_successive_draws_are_independent() -> None:
    drawn = tokens_of(torch.zeros(20_000, 4), [Row(SamplingParams(), position=i) for i in range(20_000)])
    pairs = [a * 4 + b for a, b in itertools.pairwise(drawn)]
    assert chi_square(pairs, torch.full((16,), 1 / 16)) < CHI_SQUARE[15]


MIXED = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=40),
    SamplingParams(top_p=0.9, temperature=1.3),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=300, top_p=0.99, min_p=1e-6, temperature=2.0),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logprobs=3),
    SamplingParams(top_p=0.999, temperature=5.0),
    SamplingParams(logit_bias={3: 5.0}, logprobs=0),
    SamplingParams(allowed_token_ids=[1, 2, 3], top_k=2),
    SamplingParams(min_tokens=10, top_p=0.5),
]


@pytest.mark.parametrize("vocab_size", [500, 20_000])
def test_a_row_alone_and_among_64_is_the_same(vocab_size: int) -> None:
    rows = [
        Row(MIXED[i % len(MIXED)], seed=i // 2, prompt=range(i + 1), output=[5, i], stop_token_ids=[7, 9])
        for i in range(64)
    ]
    logits = logits_of(64, vocab_size)
    together = tokens_of(logits, rows)
    alone = [tokens_of(logits[i : i + 1], [rows[i]])[0] for i in range(64)]
    assert together == alone
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    assert tokens_of(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(4, 1000)
    rows = [Row(SamplingParams(), seed=s, position=p) for s, p in ((1, 1), (1, 2), (2, 1), (1, 1))]
    a, b, c, again = tokens_of(logits, rows)
    assert len({a, b, c}) == 3
    assert a == again


def test_draws_never_change() -> None:
    """A seed means the same tokens in every release and on every machine."""
    rows = [Row(SamplingParams(), seed=2**63 + i, position=i) for i in range(8)]
    assert tokens_of(torch.zeros(8, 50_000), rows) == [45241, 5805, 37591, 36510, 1033, 2168, 23905, 28645]


def test_a_negative_seed_is_its_64_bits() -> None:
    logits = torch.zeros(2, 1000)
    minus, plus = tokens_of(logits, [Row(SamplingParams(), seed=-3), Row(SamplingParams(), seed=2**64 - 3)])
    assert minus == plus


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=50), SamplingParams(top_p=0.8), SamplingParams(min_p=0.1), SamplingParams(top_k=2000)],
)
def test_a_restricted_draw_is_the_plain_draw_where_that_survives(params: SamplingParams) -> None:
    """One definition of the noise for both paths: restricting changes the token only if the plain draw is cut."""
    logits = logits_of(200, 3000)
    plain = tokens_of(logits, [Row(SamplingParams(), position=i) for i in range(200)])
    restricted = tokens_of(logits, [Row(params, position=i) for i in range(200)])
    equal = sum(a == b for a, b in zip(plain, restricted, strict=True))
    probability = logits.softmax(dim=1).gather(1, torch.tensor([plain]).T)
    likely = [i for i in range(200) if probability[i] > 0.3 * logits[i].softmax(dim=0).max()]
    assert len(likely) > 20
    assert equal >= len(likely)
    assert all(plain[i] == restricted[i] for i in likely)


def test_a_tiny_change_of_logits_rarely_changes_a_token() -> None:
    logits = logits_of(500, 2000)
    rows = [Row(SamplingParams(), position=i) for i in range(500)]
    before = tokens_of(logits, rows)
    after = tokens_of(logits + torch.randn(500, 2000, generator=torch.Generator().manual_seed(5)) * 1e-5, rows)
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 1


@pytest.mark.parametrize("temperature", [1e-30, 1e-9, 1e-5])
def test_a_temperature_near_0_is_greedy(temperature: float) -> None:
    logits = logits_of(32, 1000) * 10
    for extra in ({}, {"top_k": 10}, {"top_p": 0.5}, {"min_p": 0.5}):
        params = SamplingParams(temperature=temperature, **extra)
        assert tokens_of(logits, [Row(params, seed=i) for i in range(32)]) == logits.argmax(dim=1).tolist()


def test_a_high_temperature_is_flat() -> None:
    logits = logits_of(1, 50).expand(2000, -1)
    drawn = tokens_of(logits, [Row(SamplingParams(temperature=1e4), position=i) for i in range(2000)])
    assert chi_square(drawn, torch.full((50,), 0.02)) < CHI_SQUARE[49]


@pytest.mark.parametrize("num_rows", [1, 3, 64, 256])
@pytest.mark.parametrize("vocab_size", [2, 17, 4096, 40_000])
def test_argmax_takes_the_lowest_id_on_a_tie(num_rows: int, vocab_size: int) -> None:
    values = torch.randint(0, 3, (num_rows, vocab_size), generator=torch.Generator().manual_seed(2)).float()
    expected = [row.index(max(row)) for row in values.tolist()]
    columns, largest = largest_of_rows(values)
    assert columns.tolist() == expected and torch.equal(largest, values.amax(dim=1))
    assert values.argmax(dim=1).tolist() == expected  # what a GPU does
    assert tokens_of(values, [Row()] * num_rows) == expected
    values = torch.full((num_rows, vocab_size), -1.0)
    values[:, 1:] = 2.0
    assert tokens_of(values, [Row()] * num_rows) == [1] * num_rows


def test_an_impossible_row_is_minus_1_and_hurts_no_other() -> None:
    logits = logits_of(12, 2500)
    kinds = [GREEDY, SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5)]
    rows = [Row(kinds[i % 4], seed=i) for i in range(12)]
    expected = tokens_of(logits, rows)
    logits[4:8] = -torch.inf
    for wrong in (torch.nan, torch.inf):
        logits[8:12, 77] = wrong
        assert tokens_of(logits, rows) == expected[:4] + [-1] * 8
        assert tokens_of(logits.repeat(40, 1), rows * 40) == (expected[:4] + [-1] * 8) * 40, "a large batch"
    assert tokens_of(logits[4:8], rows[4:8]) == [-1] * 4
    assert tokens_of(logits[4:5], rows[4:5]) == [-1]


def test_one_possible_token_is_drawn() -> None:
    logits = torch.full((len(MIXED), 700), -torch.inf)
    logits[:, 3] = -40.0
    rows = [Row(params, seed=i) for i, params in enumerate(MIXED)]
    assert tokens_of(logits, rows) == [3] * len(MIXED)


def test_no_rows() -> None:
    assert tokens_of(torch.empty(0, 100), []) == []


def test_logits_of_the_wrong_shape_are_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="of shape"):
        sample(torch.zeros(3, 10), [Row()])
    with pytest.raises(AssertionError, match="float64"):
        sample(torch.zeros(1, 10, dtype=torch.float64), [Row()])


def test_numpy_argmax_sees_infinities() -> None:
    values = torch.tensor([[-np.inf, -np.inf, -1024.0], [np.inf, 1.0, np.inf]])
    columns, largest = largest_of_rows(values)
    assert (columns.tolist(), largest.tolist()) == ([2, 0], [-1024.0, np.inf])
