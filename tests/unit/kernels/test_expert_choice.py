"""Routers and sums of experts, in plain torch, against what transformers' own modules give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from inflight.config.architecture import SIGMOID
from inflight.config.experts import HIGHEST, SOFTMAX, SPARSE_MIXER, TWO_HIGHEST, MoeSpec, RouterSpec
from inflight.kernels.expert_choice import choose_experts, compute_experts


def spec(num_experts: int = 6, *, shared_size: int = 0, has_shared_gate: bool = False, **router: object) -> MoeSpec:
    made = RouterSpec(**{"top_k": 2, **router})  # type: ignore[arg-type]
    return MoeSpec(
        num_experts=num_experts, size=4, router=made, shared_size=shared_size, has_shared_gate=has_shared_gate
    )


def chosen_and_weights(logits: Tensor, of: MoeSpec, bias: Tensor | None = None) -> tuple[list[list[int]], Tensor]:
    choices = choose_experts(logits, of, bias)
    return choices[..., 0].tolist(), choices[..., 1].contiguous().view(torch.float32)


LOGITS = torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.0, 2.0], [9.0, -9.0, 0.0, 1.0, 2.0, 3.0]])


def test_of_equal_scores_the_lower_index_comes_first() -> None:
    chosen, weights = chosen_and_weights(LOGITS, spec())
    assert chosen == [[1, 3], [0, 5]]
    torch.testing.assert_close(weights, LOGITS.softmax(-1).gather(1, torch.tensor(chosen)))


def test_renormalized_weights_are_a_softmax_over_the_chosen_ones() -> None:
    chosen, weights = chosen_and_weights(LOGITS, spec(top_k=3, renormalizes=True))
    torch.testing.assert_close(weights, LOGITS.gather(1, torch.tensor(chosen)).softmax(-1))


def test_sigmoids_and_a_scale() -> None:
    chosen, weights = chosen_and_weights(LOGITS, spec(scoring=SIGMOID, scale=2.5))
    torch.testing.assert_close(weights, 2.5 * LOGITS.gather(1, torch.tensor(chosen)).sigmoid())


def test_a_bias_changes_the_choice_and_no_weight() -> None:
    bias = torch.tensor([0.0, 0.0, 0.9, 0.0, 0.0, 0.0])
    chosen, weights = chosen_and_weights(LOGITS, spec(scoring=SIGMOID), bias)
    assert chosen == [[2, 1], [2, 0]]
    torch.testing.assert_close(weights, LOGITS.gather(1, torch.tensor(chosen)).sigmoid())


@pytest.mark.parametrize("jitter", [0.01, 0.1, 0.5])
def test_the_sparse_mixer_is_that_of_transformers(jitter: float) -> None:
    logits = torch.randn(200, 6, generator=torch.Generator().manual_seed(4))
    logits[::2] -= 3  # the highest may be below 0
    weights, chosen = sparsemixer(logits, jitter_eps=jitter, training=False)
    of = spec(top_k=2, scoring=SPARSE_MIXER, jitter=jitter)
    found, ours = chosen_and_weights(logits, of)
    assert found == chosen.tolist()
    torch.testing.assert_close(ours, weights)


def test_weights_are_multiplied_by_the_scale_of_their_expert() -> None:
    scale = torch.tensor([0.5, -2.0, 0.0, 3.0, 1.0, 7.0])
    of = spec(renormalizes=True, has_expert_scale=True)
    weights = choose_experts(LOGITS, of, None, scale)[..., 1].contiguous().view(torch.float32)
    torch.testing.assert_close(weights, LOGITS.topk(2).values.softmax(-1) * torch.tensor([[-2.0, 3.0], [0.5, 7.0]]))


@pytest.mark.parametrize(
    ("group_scoring", "numbers", "wanted"),
    [
        (HIGHEST, [3.0, -9.0, 2.0, 2.0, 1.0, 1.0], [0, 2, 3]),
        (TWO_HIGHEST, [3.0, -9.0, 2.0, 2.0, 1.0, 1.0], [2, 3, 4]),
        (HIGHEST, [1.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0, 2, 3]),  # of equal groups the first two
    ],
)
def test_only_experts_of_the_best_groups_are_chosen(
    group_scoring: str, numbers: list[float], wanted: list[int]
) -> None:
    of = spec(top_k=3, scoring=SIGMOID, num_groups=3, top_groups=2, group_scoring=group_scoring)
    assert sorted(chosen_and_weights(torch.tensor([numbers]), of)[0][0]) == wanted


@pytest.mark.parametrize("router", [{}, *({"num_groups": 3, "group_scoring": each} for each in (HIGHEST, TWO_HIGHEST))])
def test_a_chunk_of_a_prompt_in_which_no_token_is_sampled_needs_no_choice(router: dict[str, object]) -> None:
    of = spec(top_k=3, scoring=SIGMOID, top_groups=2 if router else 1, **router)
    assert choose_experts(torch.empty(0, 6), of).shape == (0, 3, 2)


def test_scores_that_are_all_zero_give_weights_of_zero() -> None:
    _, weights = chosen_and_weights(torch.full((1, 6), -200.0), spec(scoring=SIGMOID, renormalizes=True))
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("num_experts", "router", "problem"),
    [
        (6, {"top_k": 7}, "7 of 6 experts cannot be chosen"),
        (6, {"num_groups": 4}, "6 experts cannot be divided into 4 groups"),
        (6, {"num_groups": 2, "top_groups": 3}, "3 of 2 groups of experts cannot be chosen"),
        (6, {"num_groups": 3, "top_groups": 1, "top_k": 3}, "1 groups of 2 experts do not have 3 experts"),
        (6, {"num_groups": 6, "top_groups": 2, "group_scoring": TWO_HIGHEST}, "6 groups of 6 experts have no second"),
        (6, {"num_groups": 6, "top_groups": 2}, None),
        (6, {"num_groups": 3, "top_groups": 3, "top_k": 6, "group_scoring": TWO_HIGHEST}, None),
    ],
)
def test_a_router_must_fit_its_experts(num_experts: int, router: dict[str, object], problem: str | None) -> None:
    found = spec(num_experts, **router).router.problem(num_experts)  # type: ignore[arg-type]
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.parametrize("has_gate", [False, True])
def test_a_shared_expert_is_the_last_one(has_gate: bool) -> None:
    of = spec(num_experts=5, shared_size=3, has_shared_gate=has_gate, scale=3.0)
    logits = LOGITS if has_gate else LOGITS[:, :5]
    chosen, weights = chosen_and_weights(logits, of)
    assert [each[2] for each in chosen] == [5, 5]
    torch.testing.assert_close(weights[:, 2], LOGITS[:, 5].sigmoid() if has_gate else torch.ones(2))


def test_nan_stays_in_its_row() -> None:
    logits = LOGITS.clone()
    logits[1, 2] = torch.nan
    chosen, weights = chosen_and_weights(logits, spec())
    assert chosen[0] == [1, 3] and all(0 <= expert < 6 for expert in chosen[1])
    assert weights[0].isfinite().all() and weights[1].isnan().any()


@pytest.mark.parametrize("scoring", [SOFTMAX, SIGMOID])
def test_infinite_logits_give_no_weights(scoring: str) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    logits[3, 0] = -torch.inf  # one expert less
    _, weights = chosen_and_weights(logits, spec(scoring=scoring))
    assert weights.isnan().all(1).tolist() == [False, True, True, False]
    assert weights[[0, 3]].isfinite().all()


def test_a_sum_does_not_depend_on_other_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, hidden = torch.randn(40, 6, generator=generator), torch.randn(40, 8, generator=generator)
    weights = torch.randn(6, 8, generator=generator)

    def compute(rows: Tensor, numbers: Tensor) -> Tensor:
        return compute_experts(rows, choose_experts(numbers, spec(top_k=3)), lambda expert, x: x * weights[expert])

    together = compute(hidden, logits)
    assert torch.equal(together, torch.cat([compute(hidden[i : i + 1], logits[i : i + 1]) for i in range(40)]))
    scores, chosen = logits.softmax(-1).topk(3)
    wanted = (hidden[:, None] * weights[chosen] * scores[..., None]).sum(1)
    torch.testing.assert_close(together, wanted)
