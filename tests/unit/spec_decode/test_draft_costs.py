"""What drafts cost: estimated, and learned from measured times."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.config.parse_architecture import parse_architecture
from inflight.spec_decode.draft_costs import DraftCosts, MeasuredCosts, num_weights_read


def test_an_estimate() -> None:
    costs = DraftCosts(16.0, 0.25)
    assert costs.step([1, 16]).tolist() == [17.0, 32.0]
    assert costs.draft([16]).tolist() == [8.0]
    costs.observe_step(1, 1000.0)
    costs.observe_draft(1, 1000.0)
    assert costs.step([1]).tolist() == [17.0]


def test_measured_times_are_joined_by_straight_lines() -> None:
    costs = MeasuredCosts({1: 17.0, 5: 21.0, 32: 102.0}, {1: 3.0, 5: 3.5})
    assert costs.step([1, 2, 4, 32, 64]) == pytest.approx([17.0, 18.0, 20.0, 102.0, 198.0], rel=1e-6)
    assert costs.step([5])[0] == pytest.approx(21.0, rel=0.05)  # it is between two points
    assert costs.draft([1, 64]) == pytest.approx([3.0, 3.5 + 59 / 8], rel=1e-6)


def test_more_tokens_never_take_less_time() -> None:
    """Also if they did when it was measured."""
    assert MeasuredCosts({1: 10.0, 5: 9.0}, {}).step([1, 5, 100]) == pytest.approx([10.0] * 3)
    costs = MeasuredCosts({1: 10.0, 5: 11.0}, {})
    for _ in range(50):
        costs.observe_step(8, 5.0)
    assert (np.diff(costs.step(np.arange(1, 100))) >= -1e-9).all()


def test_without_a_model_that_writes_drafts_they_cost_nothing() -> None:
    costs = MeasuredCosts({1: 10.0, 5: 11.0}, {})
    assert not costs.has_passes
    assert costs.draft([1, 2]).tolist() == [0.0, 0.0]


def test_real_steps_correct_what_was_measured_at_the_start() -> None:
    costs = MeasuredCosts({1: 17.0, 5: 21.0}, {1: 3.0, 5: 3.4})
    for _ in range(20):
        for size in (32, 64):
            costs.observe_step(size, size * 6.0)
            costs.observe_draft(size, size * 1.0)
    assert costs.step([32, 64]) == pytest.approx([192.0, 384.0], rel=0.05)
    assert costs.draft([32, 64]) == pytest.approx([32.0, 64.0], rel=0.05)


def test_a_slower_machine_makes_everything_slower() -> None:
    """Only one size is seen, and the others follow it in part."""
    costs = MeasuredCosts({1: 17.0, 5: 21.0}, {1: 3.0, 5: 3.4})
    before = costs.step([1, 5])
    ratio = float(costs.draft([1])[0] / before[0])
    for _ in range(30):
        costs.observe_step(1, 34.0)
    after = costs.step([1, 5])
    assert after[0] == pytest.approx(34.0, rel=0.02)
    assert after[1] > 1.2 * before[1]
    assert ratio / 2 < costs.draft([1])[0] / after[0] < ratio


def test_one_strange_step_changes_little() -> None:
    costs = MeasuredCosts({1: 17.0, 5: 21.0}, {})
    for _ in range(30):
        costs.observe_step(1, 17.0)
    costs.observe_step(1, 1e6)
    assert costs.step([1])[0] < 35.0
    for _ in range(10):
        costs.observe_step(1, 17.0)
    assert costs.step([1])[0] == pytest.approx(17.0, rel=0.05)


def test_weights_that_a_step_reads() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert num_weights_read(parse_architecture(config)) == 32 * (100 + 3 * (4 * 32 + 3 * 64))
