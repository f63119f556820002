"""Which experts compute a token, and how their results are added: formulas in plain torch, with which all kernels must agree.

`RouterSpec` (config/experts.py) says what its fields mean. *Choices* are the experts of each token with their weights, in one
tensor: int32 [num_tokens, n, 2]. [..., 0] is the index of an expert, [..., 1] the bits of a weight in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from inflight.config.experts import HIGHEST, SOFTMAX, SPARSE_MIXER, MoeSpec, RouterSpec


def choose_experts(
    logits: Tensor, spec: MoeSpec, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> Tensor:
    """
    Args:
        logits: float32 [num_tokens, num_experts], what the router gives each expert. With `has_shared_gate` there is one more
            number, for the shared expert.
        choice_bias, expert_scale: float32 [num_experts], if the router has them.

    Returns:
        The choices. The expert with the highest score for the choice comes first; of two experts with the same score the one
        with the lower index comes first. The same holds for groups. The last one is the shared expert, if there is one; its
        index is `num_experts`. If a logit is NaN or +inf, or all are -inf, the weights of the token are NaN: no model chooses
        by such numbers, so its request shall fail.
    """
    scores = scores_of(logits, spec)
    if choice_bias is not None:
        scores = scores + choice_bias
    if spec.router.num_groups > 1:
        scores = _scores_in_best_groups(scores, spec.router)
    return weigh(logits, _highest(scores, spec.router.top_k), spec, expert_scale)


def _highest(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` highest scores of each row, int64 [num_tokens, count]."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]


def _scores_in_best_groups(scores: Tensor, router: RouterSpec) -> Tensor:
    """The scores of the experts in the chosen groups. Those of the others are minus infinity."""
    groups = scores.view(len(scores), router.num_groups, scores.shape[1] // router.num_groups)  # there may be no token
    of_group = groups.amax(-1) if router.group_scoring == HIGHEST else groups.topk(2).values.sum(-1)
    is_chosen = torch.zeros_like(of_group, dtype=torch.bool)
    is_chosen.scatter_(1, _highest(of_group, router.top_groups), True)
    return groups.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).view(scores.shape)


def scores_of(logits: Tensor, spec: MoeSpec) -> Tensor:
    """The scores of the experts, float32 [num_tokens, num_experts]."""
    routed = logits[:, : spec.num_experts]
    if spec.router.scoring == SPARSE_MIXER:
        return routed
    return routed.softmax(-1) if spec.router.scoring == SOFTMAX else routed.sigmoid()


def weigh(logits: Tensor, chosen: Tensor, spec: MoeSpec, expert_scale: Tensor | None = None) -> Tensor:
    """The choices, if the experts `chosen`, int64 [num_tokens, top_k], are chosen. `expert_scale`: as in `choose_experts`."""
    scores = scores_of(logits, spec)
    is_mixer = spec.router.scoring == SPARSE_MIXER
    weights = _mixer_weights(scores, chosen, spec.router.jitter) if is_mixer else scores.gather(-1, chosen)
    if spec.router.renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.router.sum_offset)
    weights = weights * spec.router.scale
    if expert_scale is not None:
        weights = weights * expert_scale[chosen]
    is_defined = logits[:, : spec.num_experts].amax(-1, keepdim=True).isfinite()  # not if one is NaN
    weights = weights.masked_fill(~is_defined, torch.nan)
    if spec.shared_size:
        gate = logits[:, spec.num_experts :].sigmoid() if spec.has_shared_gate else torch.ones_like(weights[:, :1])
        chosen = torch.cat([chosen, torch.full_like(chosen[:, :1], spec.num_experts)], dim=1)
        weights = torch.cat([weights, gate], dim=1)
    return torch.stack((chosen.to(torch.int32), weights.contiguous().view(torch.int32)), dim=-1)


def _mixer_weights(logits: Tensor, chosen: Tensor, jitter: float) -> Tensor:
    """See SPARSE_MIXER in `RouterSpec`. [num_tokens, top_k]"""
    left, weights = logits.clone(), []
    for place in range(chosen.shape[1]):
        highest = left.amax(-1, keepdim=True)
        is_far = (highest - logits) / logits.abs().maximum(highest) > 2 * jitter
        expert = chosen[:, place : place + 1]
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, expert))
        left.scatter_(-1, expert, -torch.inf)
    return torch.cat(weights, dim=1)


def compute_experts(hidden: Tensor, choices: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The sum of weight * result over the experts of each token, from the first to the last, in float32. So the sum does not
    depend on the other tokens.

    Args:
        hidden: [num_tokens, size].
        compute: called with an expert and rows of `hidden`; gives the results of this expert, float32 [num_rows, size].

    Returns:
        float32 [num_tokens, size]
    """
    results = torch.empty((*choices.shape[:2], hidden.shape[1]), dtype=torch.float32, device=hidden.device)
    write_results(hidden, choices, compute, results)
    return add_results(results)


def write_results(
    hidden: Tensor, choices: Tensor, compute: Callable[[int, Tensor], Tensor | None], results: Tensor
) -> None:
    """Writes weight * result of each choice to `results`, float32 [num_tokens, n, size]. The first arguments are those of
    `compute_experts`. If `compute` returns None for an expert, its places in `results` stay as they are."""
    chosen, weights = choices[..., 0], choices[..., 1].contiguous().view(torch.float32)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, places = torch.where(chosen == expert)
        computed = compute(expert, hidden[tokens])
        if computed is not None:
            results[tokens, places] = computed * weights[tokens, places].unsqueeze(-1)


def add_results(results: Tensor) -> Tensor:
    """The sum over the second dimension, from first to last: [num_tokens, n, size] -> [num_tokens, size]."""
    total = results[:, 0].clone()
    for place in range(1, results.shape[1]):
        total += results[:, place]
    return total
