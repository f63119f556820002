"""Errors of logits, and losses of right answers, which are paired."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quality.accuracy import LogitsError, Truth, engine_args_for, logits_of, relative_error
from benchmarks.quality.task_accuracy import Loss
from benchmarks.shared.observed_engine import ObservedEngine
from inflight.hub import EMBEDDED_MODEL


def test_errors_of_logits() -> None:
    truth = torch.tensor([[4.0, 0.0, 0.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    assert LogitsError.of(truth, truth.float()) == LogitsError(0.0, 1.0, 0.0)
    moved = LogitsError.of(truth, torch.tensor([[4.0, 0.0, 0.0], [4.0, 3.0, 0.0]]))
    assert moved.agreement == 0.5 and moved.divergence > 0.1
    assert (
        moved.relative == relative_error(truth, torch.tensor([[4.0, 0.0, 0.0], [4.0, 3.0, 0.0]])) == pytest.approx(0.8)
    )


def test_logits_are_those_of_every_position() -> None:
    prompts = [list(range(5, 45)), list(range(9, 14))]  # the first takes two steps
    with ObservedEngine(engine_args_for(EMBEDDED_MODEL, prompts, {})) as engine:
        found = logits_of(engine, prompts)
    truth = Truth(EMBEDDED_MODEL, prompts).logits
    assert found.shape == truth.shape and relative_error(truth, found) < 0.05


def test_losses_are_paired() -> None:
    right, wrong = [True] * 100, [True] * 98 + [False] * 2
    assert Loss.of(right, wrong).points == pytest.approx(2.0)
    assert Loss.of(right, right) == Loss(0.0, 0.0)
    assert Loss.of([True, False], [False, True]) == Loss(0.0, pytest.approx(70.7, abs=0.1))
