"""`StepTimeModel`: predicts how long a step computes, and learns it from the times that the workers report.

    seconds = slowdown * (fixed cost + sum of cost * amount, over the amounts of a `StepLoad`)

- **Costs** belong to the model and the machine. Recursive least squares with forgetting fits them to the measured times
  (Ljung, *System Identification*, 2nd ed., 11.2). Errors are relative to a step's time, so short steps count like long ones.
- **Slowdown** belongs to the moment: another process may have taken a core. It follows the last few steps, and rises faster
  than it falls. The costs are fitted to measured times divided by the slowdown, so a busy neighbour hardly distorts them.

The cost of a token depends on how many tokens the step has: up to some number they are nearly free, because the step only
reads the weights. So there is a cost for the first few tokens, for the next ones, and for all others. A new kind of work gets
a term of its own in `StepLoad.amounts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inflight.interface.step import SchedulerOutput

TOKEN_LIMITS = (16, 128)  # token costs change at these numbers of tokens in a step
FORGETTING = 0.995  # weight of a step's time after the next step
NOISE = 0.1  # expected relative error of a measured time
UNCERTAINTY = 0.5  # expected relative error of the costs at the start, and the largest that forgetting may restore
RISE, FALL = 0.5, 0.15  # how far the slowdown moves toward that of the last step
STAY = 0.95  # a slowdown that stays becomes part of the costs: they are fitted to time / slowdown ** STAY
MAX_SURPRISE = 3.0  # a step that takes so many times its predicted time, or 1 / so many, is no measure of costs
MIN_SLOWDOWN, MAX_SLOWDOWN = 0.05, 50.0
MIN_COST, MAX_COST = 0.01, 100.0  # bounds of each cost, in units of its first value


@dataclass(slots=True)
class StepLoad:
    """What a step computes.

    Attributes:
        num_tokens: all tokens, of prompts, decodes and drafts.
        num_draws: rows that draw a token.
        num_pairs: over the tokens of prompts, the sum of the tokens that each of them attends to.
        context: over all rows, the sum of the computed tokens before them, whose keys and values the step reads.
    """

    num_tokens: int = 0
    num_draws: int = 0
    num_pairs: int = 0
    context: int = 0

    def add_decode(self, context: int, num_drafts: int = 0) -> None:
        """Add a row that continues a sequence of `context` computed tokens with one token and its drafts."""
        self.num_tokens += 1 + num_drafts
        self.num_draws += 1 + num_drafts
        self.context += context

    def add_prompt(self, context: int, num_tokens: int, *, draws: bool) -> None:
        """Add a row of `num_tokens` prompt tokens that follow `context` computed ones."""
        self.num_tokens += num_tokens
        self.num_draws += draws
        self.context += context
        self.num_pairs += num_tokens * (2 * context + num_tokens) // 2

    def amounts(self) -> tuple[float, ...]:
        """The factors of the costs."""
        few, many = TOKEN_LIMITS
        tokens = self.num_tokens
        return (
            1.0,
            min(tokens, few),
            max(0, min(tokens, many) - few),
            max(0, tokens - many),
            self.num_draws,
            self.num_pairs,
            self.context,
        )


def load_of(plan: SchedulerOutput) -> StepLoad:
    """The load of a planned step. Drafts count as planned, although the workers may have fewer."""
    scheduled, computed, drafts = plan.num_scheduled_tokens, plan.num_computed_tokens, plan.max_draft_tokens
    is_prompt = scheduled > 1 if not len(drafts) else (scheduled > 1) & (drafts < 0)
    lengths = scheduled[is_prompt].astype(np.int64)
    return StepLoad(
        num_tokens=int(scheduled.sum()),
        num_draws=int(np.count_nonzero(plan.samples)) + int(np.maximum(drafts, 0).sum()),
        num_pairs=int((lengths * (2 * computed[is_prompt] + lengths) // 2).sum()),
        context=int(computed.sum()),
    )


class StepTimeModel:
    """All times are in seconds. Owned by the scheduler's thread.

    Args:
        costs: the expected cost of each amount of `StepLoad.amounts`; each must be positive.
    """

    def __init__(self, costs: tuple[float, ...]) -> None:
        self._scale = np.array(costs)  # costs are fitted in these units
        self._fitted = np.ones(len(costs))
        self._covariance = np.eye(len(costs)) * UNCERTAINTY**2
        self._costs = costs
        self.slowdown = 1.0

    @classmethod
    def from_times(cls, one_token: float, few_tokens: float, many_tokens: float) -> StepTimeModel:
        """Start with three measured times: of steps with 1 token, and with `TOKEN_LIMITS` tokens of a prompt."""
        few, many = TOKEN_LIMITS
        least = one_token / 1000  # no cost may be zero: its unit would be zero, too
        per_token = max((many_tokens - few_tokens) / (many - few), least)
        first = max((few_tokens - one_token) / (few - 1), least)
        pair = per_token / 10_000  # 1,000 tokens before a prompt token make it cost a tenth more
        return cls((one_token, first, per_token, per_token, one_token / 100, pair, one_token / 50_000))

    def seconds(self, load: StepLoad) -> float:
        """The time that a step with this load computes."""
        return self.slowdown * self._unhindered_seconds(load)

    def _unhindered_seconds(self, load: StepLoad) -> float:
        return sum([cost * amount for cost, amount in zip(self._costs, load.amounts(), strict=True)])

    def num_prompt_tokens_within(self, seconds: float, load: StepLoad, context: int, most: int) -> int:
        """How many of `most` prompt tokens can be added to `load`, behind `context` computed tokens, so that the step takes at
        most `seconds`."""
        *_, pair_cost, context_cost = self._costs
        allowed = seconds / self.slowdown - self._unhindered_seconds(load) + self._token_seconds(load.num_tokens)
        allowed -= context_cost * context
        low, high = 0, most
        while low < high:  # binary search: the time rises with the number of tokens
            count = (low + high + 1) // 2
            pairs = count * (2 * context + count) // 2
            if self._token_seconds(load.num_tokens + count) + pair_cost * pairs <= allowed:
                low = count
            else:
                high = count - 1
        return low

    def _token_seconds(self, num_tokens: int) -> float:
        _, first, second, third, *_ = self._costs
        few, many = TOKEN_LIMITS
        if num_tokens <= few:
            return first * num_tokens
        if num_tokens <= many:
            return first * few + second * (num_tokens - few)
        return first * few + second * (many - few) + third * (num_tokens - many)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that computed for `seconds`."""
        surprise = seconds / self.seconds(load)
        if 1 / MAX_SURPRISE < surprise < MAX_SURPRISE:
            self._fit(load, seconds / self.slowdown**STAY)
        surprise = min(max(surprise, 1 / MAX_SURPRISE), MAX_SURPRISE)
        moved = self.slowdown * (1 + (RISE if surprise > 1 else FALL) * (surprise - 1))
        self.slowdown = min(max(moved, MIN_SLOWDOWN), MAX_SLOWDOWN)

    def _fit(self, load: StepLoad, seconds: float) -> None:
        """One step of recursive least squares for the equation: sum of cost * amount / seconds = 1."""
        shares = self._scale * load.amounts() / seconds
        projected = self._covariance @ shares
        gain = projected / (NOISE**2 + shares @ projected)
        self._fitted += gain * (1.0 - shares @ self._fitted)
        np.clip(self._fitted, MIN_COST, MAX_COST, out=self._fitted)
        self._covariance -= np.outer(gain, projected)
        # costs that no step shows for long must not be forgotten
        if self._covariance.trace() < UNCERTAINTY**2 * len(gain):
            self._covariance /= FORGETTING
        self._costs = tuple((self._fitted * self._scale).tolist())
