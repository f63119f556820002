"""`ExpertRouting`: the experts of one run are repeated in another, where their scores agree."""

from __future__ import annotations

import pytest
import torch

from inflight.models.transformers_fallback.expert_routing import ExpertRouting


@pytest.mark.parametrize("size", [1.0, 1000.0, 0.001])  # of the scores: some routers give logits, some probabilities
def test_experts_are_repeated_where_the_scores_agree(size: float) -> None:
    scores = torch.tensor([[1.0, 0.5, 0.499], [1.0, 0.5, 0.499]]) * size
    with ExpertRouting(2) as first:
        torch.topk(scores, 2)
    # one rounding turns the order of two experts around; the other token's scores are really different
    others = torch.tensor([[1.0, 0.499, 0.5], [0.0, 0.499, 0.9]]) * size
    with ExpertRouting(2, first.noted, 0.05):
        values, experts = others.topk(2)
    assert experts.tolist() == [[0, 1], [2, 1]]
    torch.testing.assert_close(values, torch.tensor([[1.0, 0.499], [0.9, 0.499]]) * size)
    with ExpertRouting(2, first.noted, 1e-6):
        assert others.topk(2)[1].tolist() == [[0, 2], [2, 1]]


def test_only_scores_of_each_token_are_noted() -> None:
    with ExpertRouting(3) as routing:
        torch.topk(torch.randn(5, 4), 2)
        torch.topk(torch.randn(1, 3, 4), 2)
    assert [tuple(scores.shape) for scores, _ in routing.noted] == [(3, 4)]


def test_a_choice_among_other_things_is_not_repeated() -> None:
    """A layer may choose keys: in another run there is another number of them."""
    with ExpertRouting(2) as first:
        torch.topk(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]), 1)
    with ExpertRouting(2, first.noted, 1.0):
        assert torch.topk(torch.tensor([[4.0, 2.0], [4.0, 2.0]]), 1)[1].tolist() == [[0], [0]]
