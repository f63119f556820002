"""Scores of pairs of texts, against plain formulas."""

import numpy as np
import pytest

from inflight.entrypoints.pooled_values import cosine, max_sim


def test_cosine() -> None:
    rng = np.random.default_rng(1)
    one, other = rng.normal(size=(2, 1, 64)).astype(np.float32)
    expected = sum(a * b for a, b in zip(one[0], other[0], strict=True)) / np.sqrt((one**2).sum() * (other**2).sum())
    assert cosine(one, other) == pytest.approx(float(expected), abs=1e-6)
    assert cosine(one, one) == pytest.approx(1.0)
    assert cosine(one, np.zeros_like(one)) == 0.0


def test_max_sim() -> None:
    rng = np.random.default_rng(2)
    query, document = rng.normal(size=(3, 8)).astype(np.float32), rng.normal(size=(5, 8)).astype(np.float32)
    expected = sum(max(float(q @ d) for d in document) for q in query)
    assert max_sim(query, document) == pytest.approx(expected, abs=1e-5)
