"""The noise: exponential, independent, and the same however it is asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.sample.noise import log_exponential as log_exponential_of_words
from inflight.sample.noise import noise_words, token_hashes
from inflight.sample.seeds import draw_keys

CPU = torch.device("cpu")


def keys_of(seeds: object, positions: object) -> Tensor:
    seeds, positions = np.broadcast_arrays(np.asarray(seeds, dtype=np.uint64), np.asarray(positions, dtype=np.int64))
    return torch.from_numpy(draw_keys(seeds.copy(), positions.copy()))


def log_exponential(hashes: Tensor, keys: Tensor) -> Tensor:
    return log_exponential_of_words(noise_words(hashes, keys))


def exponential(num_draws: int, vocab_size: int, seed: int = 0) -> Tensor:
    keys = keys_of([seed] * num_draws, range(num_draws))
    return log_exponential(token_hashes(vocab_size, CPU), keys).double().exp()


def test_hashes_are_a_permutation() -> None:
    hashes = token_hashes(300_000, CPU)
    assert len(set(hashes.tolist())) == 300_000


@pytest.mark.parametrize("vocab_size", [17, 4096, 151_936])
def test_the_distribution_is_exponential(vocab_size: int) -> None:
    """Kolmogorov-Smirnov: the largest distance of the distribution functions."""
    values = exponential(2_000_000 // vocab_size, vocab_size).flatten().sort().values
    n = len(values)
    distance = (-torch.expm1(-values) - (torch.arange(n) + 0.5) / n).abs().max()
    assert distance * math.sqrt(n) < 1.95  # 0.1 % of true exponentials are farther


def test_small_values_are_resolved() -> None:
    """They win. P(E < x) = x must hold far below 2**-24, where 1 - u has no float32 left."""
    values = exponential(60, 151_936).flatten()
    for power in (16, 18, 20, 22):
        expected = len(values) * 2.0**-power
        assert abs(int((values < 2.0**-power).sum()) - expected) < 4 * math.sqrt(expected)
    smallest = values.topk(200, largest=False).values
    assert len(set(smallest.tolist())) > 190  # of a grid of 2**-31, on which 200 of these meet about thrice


def test_values_are_finite_and_positive() -> None:
    values = exponential(100, 151_936)
    assert values.isfinite().all()
    assert values.min() > 0
    hashes = torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    keys = torch.tensor([[0, 1], [-1, -1], [2**31 - 1, 2**31 - 1]], dtype=torch.int32)
    assert log_exponential(hashes, keys).isfinite().all()


@pytest.mark.parametrize("lag", [1, 2, 64, 128, 4096])
def test_neighbouring_tokens_are_uncorrelated(lag: int) -> None:
    uniform = torch.exp(-exponential(40, 50_000))
    assert abs(correlation(uniform[:, lag:], uniform[:, :-lag])) < 4 / math.sqrt(40 * (50_000 - lag))


@pytest.mark.parametrize(("seed", "position"), [(0, 1), (1, 0), (0, 2**20), (2**63, 0), (1, 1)])
def test_draws_are_uncorrelated(seed: int, position: int) -> None:
    hashes = token_hashes(500_000, CPU)
    first, second = log_exponential(hashes, keys_of([0, seed], [0, position])).double().exp().neg().exp()
    assert abs(correlation(first, second)) < 4 / math.sqrt(500_000)


def test_joint_distribution_of_draws_is_flat() -> None:
    """Correlation sees lines only: chi-square of pairs (token i, token i + 1) and (position, position + 1), 32 x 32 cells."""
    uniform = torch.exp(-exponential(64, 30_000))
    for a, b in ((uniform[:, 1:], uniform[:, :-1]), (uniform[1:], uniform[:-1]), (uniform[1:, 1:], uniform[:-1, :-1])):
        cells = (a * 32).long().clamp(max=31) * 32 + (b * 32).long().clamp(max=31)
        counts = torch.bincount(cells.flatten(), minlength=1024).double()
        expected = counts.sum() / 1024
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert abs(statistic - 1023) < 4.5 * math.sqrt(2 * 1023)


def test_one_token_over_positions_is_uniform() -> None:
    """A request draws along positions; the values of one token must be as good as those of one draw."""
    for token in (0, 1, 1000):
        hashes = token_hashes(1001, CPU)[token : token + 1]
        keys = keys_of([7] * 100_000, range(100_000))
        values = log_exponential(hashes, keys).double().exp().flatten().sort().values
        distance = (-torch.expm1(-values) - (torch.arange(100_000) + 0.5) / 100_000).abs().max()
        assert distance * math.sqrt(100_000) < 1.95


def test_noise_of_a_token_is_the_same_alone_and_among_all() -> None:
    hashes = token_hashes(151_936, CPU)
    keys = keys_of([3, 4, 5], [10, 20, 30])
    whole = log_exponential(hashes, keys)
    ids = torch.tensor([0, 5, 70_001, 151_935])
    assert torch.equal(log_exponential(hashes[ids], keys), whole[:, ids])
    assert torch.equal(log_exponential(hashes[ids].expand(3, -1), keys), whole[:, ids])
    assert torch.equal(log_exponential(hashes, keys[1:2]), whole[1:2])
    assert torch.equal(log_exponential(hashes[:1000], keys), whole[:, :1000])


def test_scratch_memory_changes_nothing() -> None:
    hashes = token_hashes(1000, CPU)
    keys = keys_of([1, 2], [3, 4])
    words = torch.empty(2, 1000, dtype=torch.int32)
    assert noise_words(hashes, keys, out=words) is words
    assert torch.equal(words, noise_words(hashes, keys))
    assert torch.equal(hashes, token_hashes(1000, CPU))


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])
