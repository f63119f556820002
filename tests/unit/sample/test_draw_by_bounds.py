"""The fast way of the CPU finds the tokens that all scores find."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight.sample.draw import draw_random
from inflight.sample.draw_by_bounds import bound_from_below, draw_by_bounds
from inflight.sample.noise import log_exponential, noise_words, token_hashes
from inflight.sample.seeds import draw_keys

CPU = torch.device("cpu")


def keys_of(num_draws: int) -> torch.Tensor:
    return torch.from_numpy(draw_keys(np.arange(num_draws, dtype=np.uint64), np.arange(num_draws)))


@pytest.mark.parametrize("vocab_size", [3, 100, 4096, 30_000])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 4.0, 50.0, 1e4, 1e22])
def test_bounds_find_the_winner(vocab_size: int, scale: float) -> None:
    """The fast way of the CPU against all scores."""
    num_rows = max(60, min(20_000, 1_000_000 // vocab_size))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3 * scale
    logits[5] = -torch.inf
    logits[6, 1:] = -torch.inf
    logits[7, 2] = torch.nan
    logits[8, 1] = torch.inf
    logits[9, ::2] = -torch.inf
    keys = keys_of(num_rows)
    hashes = token_hashes(vocab_size, CPU)
    tokens, scores = draw_by_bounds(logits, keys, hashes)
    expected = logits - log_exponential(noise_words(hashes, keys))
    assert tokens.tolist() == expected.numpy().argmax(axis=1).tolist()
    torch.testing.assert_close(scores, expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(draw_random(logits, keys, hashes)[0], tokens)


def test_the_bound_is_below_and_near() -> None:
    edges = torch.tensor([0, 1, 2, 3, 4, 2**24 - 1, 2**24 + 1, 2**31 - 65, 2**31 - 64, 2**31 - 1], dtype=torch.int32)
    powers = torch.tensor([2**i + j for i in range(2, 31) for j in (-1, 0, 1)], dtype=torch.int32)
    words = torch.cat([edges, powers, noise_words(token_hashes(1_000_000, CPU), keys_of(1))[0]])
    exact = log_exponential(words)
    bound = bound_from_below(words, torch.empty_like(exact))
    assert (bound <= exact + 1e-4).all()
    small = (words > 0) & (words < 2**27)  # E is near u there
    assert (bound[small] >= exact[small] - 0.1).all()
