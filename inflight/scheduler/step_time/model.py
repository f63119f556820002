"""`StepTimeModel`: predicts how long a step computes, and learns it from the times that the workers report.

    seconds = slowdown * (fixed cost + sum of cost * amount, over the amounts of a `StepLoad`)

- **Costs** belong to the model and the machine. Recursive least squares with forgetting fits them to the measured times
  (Ljung, *System Identification*, 2nd ed., 11.2). The error of a step is log(measured / predicted), so short steps count like
  long ones. The slowdown is updated with the same error. If costs and slowdown used different errors, noise would move
  them in opposite directions.
- **Slowdown** is the state of the machine at the moment: another process may use a core. It is fitted to the last few steps.
  The costs are fitted to measured times divided by the slowdown, so another process hardly changes them. After each step the
  slowdown moves a little toward 1. So if the machine stays slow, the costs rise and the slowdown falls.
- **Held slowdown** rises at once when the slowdown rises, and falls slowly. It decides how many prompt tokens fit into a step,
  because another program that pauses often goes on soon. Steps that were planned during the pause may then still wait. If they
  had been planned with the low slowdown of the pause, they would exceed the limit. The costs are not fitted with it.
- **Spread** is the mean relative error of the predictions. Prompts fill a step only up to limit / (1 + spread), so that most
  steps keep the limit although the predictions are not exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from inflight.scheduler.step_time.load import TOKEN_LIMITS, StepLoad

FORGETTING = 0.995  # with each step, the weights of all earlier steps in the fit are multiplied by this factor
NOISE = 0.1  # expected relative error of a measured time
# expected relative error of the costs at the start; forgetting never makes the mean of the costs' errors larger than this
UNCERTAINTY = 0.5
PACE = 0.5  # after each step, the slowdown moves by this share of its distance to that step's slowdown, in logarithms
RETURN = 0.01  # then it moves by this share of its distance to 1, in logarithms
# in each step the held slowdown falls by this share of its distance to the slowdown, in logarithms
DECAY_PACE = 0.1
SPREAD_PACE = 0.05
MAX_SPREAD = 0.25
# measured / predicted is limited to [1 / MAX_SURPRISE, MAX_SURPRISE], so that one strange step changes little
MAX_SURPRISE = 3.0
MIN_SLOWDOWN = 0.05
MAX_SLOWDOWN = 50.0
MIN_COST, MAX_COST = 0.01, 100.0  # bounds of each cost, in units of its first value


class StepTimeModel:
    """All times are in seconds. Owned by the scheduler's thread.

    Args:
        costs: the expected seconds per unit of each amount of `StepLoad.amounts`, and then of `share_read`; each must be
            positive.
        share_read: of a model with experts: the share of the weights that a step of so many tokens is expected to read. None:
            every step reads all.
    """

    def __init__(self, costs: tuple[float, ...], share_read: Callable[[int], float] | None = None) -> None:
        self._share_read = share_read
        self._scale = np.array(costs)  # costs are fitted in these units
        self._fitted = np.ones(len(costs))
        self._covariance = np.eye(len(costs)) * UNCERTAINTY**2
        self._costs = costs
        self.slowdown = self._decaying_slowdown = 1.0
        self._spread = 0.0

    @classmethod
    def from_times(cls, seconds: Sequence[float], share_read: Callable[[int], float] | None = None) -> StepTimeModel:
        """Start with three measured times: of steps with 1 token, and with `TOKEN_LIMITS` tokens of a prompt."""
        one_token, few_tokens, many_tokens = seconds
        few, many = TOKEN_LIMITS
        least = one_token / 1000  # costs are fitted in units of their first values, so no first value may be 0
        per_token = max((many_tokens - few_tokens) / (many - few), least)
        first = max((few_tokens - one_token) / (few - 1), least)
        reading: tuple[float, ...] = ()
        if share_read is not None:
            # a step of a few tokens takes longer than a step of one token mostly because it reads more experts
            whole = max((first - per_token) * (few - 1) / (share_read(few) - share_read(1)), least)
            reading, first = (whole,), per_token
            one_token = max(one_token - whole * share_read(1), least)
        pair = per_token / 10_000  # 1,000 tokens before a prompt token make it cost a tenth more
        costs = (one_token, first, per_token, per_token, one_token / 100, pair, one_token / 50_000)
        return cls(costs + reading, share_read)

    def seconds(self, load: StepLoad) -> float:
        """The predicted time of a step with this load."""
        return self.slowdown * self._unhindered_seconds(load)

    def _unhindered_seconds(self, load: StepLoad) -> float:
        return sum([cost * amount for cost, amount in zip(self._costs, self._amounts(load), strict=True)])

    def _amounts(self, load: StepLoad) -> tuple[float, ...]:
        more = () if self._share_read is None else (self._share_read(load.num_tokens),)
        return load.amounts() + more

    def num_prompt_tokens_within(self, seconds: float, load: StepLoad, context: int, most: int) -> int:
        """How many tokens of a prompt can be added to `load`, so that the step's predicted time * (1 + spread) is at most
        `seconds`. `context`: how many tokens of the prompt are computed. `most`: the most tokens that may be added."""
        pair_cost, context_cost = self._costs[5:7]
        allowed = seconds / (1 + self._spread) / self._decaying_slowdown - context_cost * context
        allowed += self._token_seconds(load.num_tokens) - self._unhindered_seconds(load)
        low = 0
        high = count = most  # often all fit
        while low < high:  # binary search: the time rises with the number of tokens
            pairs = count * (2 * context + count) // 2
            if self._token_seconds(load.num_tokens + count) + pair_cost * pairs <= allowed:
                low = count
            else:
                high = count - 1
            count = (low + high + 1) // 2
        return low

    def _token_seconds(self, num_tokens: int) -> float:
        """The seconds that a step takes for so many tokens, and to read the experts that they choose."""
        return self._unhindered_seconds(StepLoad(num_tokens)) - self._costs[0]

    def observe(self, load: StepLoad, seconds: float) -> float:
        """Learn from a step that computed for `seconds`. Returns the time that was predicted for it until now."""
        unhindered = self._unhindered_seconds(load)
        predicted = self.slowdown * unhindered
        surprise = min(max(seconds / predicted, 1 / MAX_SURPRISE), MAX_SURPRISE)
        self._fit(self._scale * self._amounts(load) / unhindered, math.log(surprise))
        error = min(abs(surprise - 1), MAX_SPREAD)
        self._spread += SPREAD_PACE * (error - self._spread)
        moved = (self.slowdown * surprise**PACE) ** (1 - RETURN)
        self.slowdown = min(max(moved, MIN_SLOWDOWN), MAX_SLOWDOWN)
        before = self._decaying_slowdown
        self._decaying_slowdown = max(self.slowdown, before * (self.slowdown / before) ** DECAY_PACE)
        return predicted

    def _fit(self, shares: np.ndarray[Any, np.dtype[np.float64]], error: float) -> None:
        """One update of recursive least squares.

        Args:
            shares: the derivative of log(predicted) by each fitted cost.
            error: log(measured / predicted).
        """
        projected = self._covariance @ shares
        gain = projected / (NOISE**2 + shares @ projected)
        self._fitted += gain * error
        np.clip(self._fitted, MIN_COST, MAX_COST, out=self._fitted)
        self._covariance -= np.outer(gain, projected)
        # if one kind of work is absent from steps for long, the uncertainty of its cost must not grow without end
        if self._covariance.trace() < UNCERTAINTY**2 * len(gain):
            self._covariance /= FORGETTING
        self._costs = tuple((self._fitted * self._scale).tolist())
