"""`DraftChoice`: how many drafts each request of a step gets.

As many as are expected to give the whole batch the most tokens per second, by how often each request's drafts are right and by
what steps and passes of a drafter cost (`DraftCosts`). None are a choice, too. In a large batch each token costs about as much
as the others, and then no drafts pay.

A step with drafts takes longer, and each request waits longer for its next token. In turn it gets several tokens at once, but
perhaps only one, and a request without drafts always gets one. So two limits hold for several requests: a step with drafts
takes at most `_LONGEST` times as long as one without, and for no request the expected time for a token is more than `_SLOWEST`
times as long.

What is not done is not measured. So a small share of the time (`TRIALS`) is saved up for trials. Where drafts pay, these are
steps without drafts. Where they do not pay, these are steps with drafts that would pay if they cost half of what is expected,
and tokens that a drafter computes only to see whether its drafts would have been right.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inflight.spec_decode.draft_costs import DraftCosts

TRIALS = 0.01  # of the time without drafts
_MARGIN = 1.04  # drafts must promise so many times the tokens per second: times are known to a few percent
_LONGEST, _SLOWEST = 2.0, 1.2  # if several requests share a step
_OFTEN = 0.9  # drafts may pay if they would when so many of them were right
_STEPS_VALID = 32  # for so many steps it is remembered whether drafts may pay in a batch of a size


def best_num_drafts(
    probabilities: Sequence[float], most: Sequence[int], costs: DraftCosts, discount: float = 1.0
) -> list[int]:
    """Returns for each request the number of drafts with which a step is expected to give the most tokens per second, within
    the limits of several requests.

    Args:
        probabilities: [n], of a request's drafts: that one is right if those before it are.
        most: [n], how many drafts there are.
        discount: drafts cost this share of what is expected, beside the limits.
    """
    n = len(probabilities)
    if n <= 1:
        return best_within(math.inf, probabilities, most, costs, discount)
    chosen = best_within(_LONGEST, probabilities, most, costs, discount)
    fewest_tokens = 1 + expected_right(probabilities, chosen).min()
    _, seconds = expected(probabilities, chosen, costs)
    if seconds <= _SLOWEST * fewest_tokens * costs.step([n])[0]:
        return chosen
    return best_within(_SLOWEST, probabilities, most, costs, discount)


def best_within(
    longest: float, probabilities: Sequence[float], most: Sequence[int], costs: DraftCosts, discount: float
) -> list[int]:
    """The best numbers of drafts with which a step takes at most `longest` times as long as without.

    Draft number i of a request is right with the probability p^i. The drafts of all requests are ordered by it, and the best
    number of the first ones is taken, for each number of passes that a drafter may make.
    """
    n = len(probabilities)
    chosen = [0] * n
    most_passes = max(most, default=0)
    if not most_passes:
        return chosen
    columns = np.arange(most_passes)
    table = _clipped(probabilities)[:, None] ** (columns + 1)
    exists = columns < np.array(most)[:, None]
    rows, places = np.nonzero(exists)
    gains = table[exists]
    order = np.argsort(-gains, kind="stable")
    rows = rows[order]
    places = places[order]
    gains = gains[order]
    alone = costs.step([n])[0]
    best = n / alone
    if costs.is_measured:
        best *= _MARGIN
    fewest_passes = 1 if costs.has_passes else most_passes
    for num_passes in range(fewest_passes, most_passes + 1):
        taken = np.flatnonzero(places < num_passes)
        counts = np.arange(1, len(taken) + 1)
        tokens = n + np.cumsum(gains[taken])
        verifying = costs.step(n + counts) - alone
        drafting = num_passes * costs.draft(counts / num_passes)
        rates = tokens / (alone + discount * (verifying + drafting))
        rates[alone + verifying + drafting > longest * alone] = 0.0
        at = int(rates.argmax())
        if rates[at] > best:
            best = rates[at]
            with_drafts = rows[taken[: at + 1]]
            chosen = np.bincount(with_drafts, minlength=n).tolist()
    return chosen


def expected_right(probabilities: Sequence[float], counts: Sequence[int]) -> npt.NDArray[np.float64]:
    """[n]: how many drafts of each request are expected to be right if it has so many."""
    clipped = _clipped(probabilities)
    powers = clipped ** np.array(counts)
    right: npt.NDArray[np.float64] = clipped * (1 - powers) / (1 - clipped)
    return right


def expected(probabilities: Sequence[float], counts: Sequence[int], costs: DraftCosts) -> tuple[float, float]:
    """How many tokens a step is expected to give if each request has so many drafts, and its seconds with the drafter's."""
    n = len(counts)
    total = sum(counts)
    passes = max(counts, default=0)
    seconds = costs.step([n + total])[0]
    if passes:
        num_rows = total / passes
        seconds += passes * costs.draft([num_rows])[0]
    tokens = n + expected_right(probabilities, counts).sum()
    return float(tokens), float(seconds)


def fewest_right(most: int, costs: DraftCosts) -> float | None:
    """How often drafts must be right to pay for one request that may have `most` of them, in steps of 0.05. None: they never
    pay."""
    for each in range(1, 21):
        share = 0.05 * each
        if any(best_num_drafts([share], [most], costs)):
            return share
    return None


class DraftChoice:
    """
    Args:
        num_speculative_tokens: the most drafts of a request.

    Attributes:
        costs: may be replaced by what was measured.
    """

    def __init__(self, costs: DraftCosts, num_speculative_tokens: int) -> None:
        self.costs = costs
        self._num_speculative_tokens = num_speculative_tokens
        self._saved = 0.0  # seconds for trials
        self._may_pay: dict[int, bool] = {}  # number of requests -> whether drafts may pay
        self._num_steps = 0

    def counts(
        self, probabilities: Sequence[float], most: Sequence[int], num_behind: npt.NDArray[np.integer] | None = None
    ) -> list[int]:
        """Call it once in a step. The arguments are those of `best_num_drafts`.

        Args:
            num_behind: [n], how many tokens a drafter must compute before it can write drafts.
        """
        self._num_steps += 1
        if self._num_steps % _STEPS_VALID == 0:
            self._may_pay.clear()
        best = best_num_drafts(probabilities, most, self.costs)
        if not probabilities:
            return best
        n = len(probabilities)
        alone = float(self.costs.step([n])[0])
        self._saved += TRIALS * alone
        self._saved = min(self._saved, alone)
        if not self.costs.is_measured:
            return best
        if any(best):
            trial = [0] * len(best)
        else:
            trial = best_num_drafts(probabilities, most, self.costs, 0.5)
        if trial == best:
            return best
        lost = self._lost(probabilities, trial, best)
        if num_behind is not None:
            has_drafts = np.array(trial) > 0
            behind = num_behind[has_drafts].sum()
            lost += self._seconds_of(int(behind))
        return trial if self.spend(lost) else best

    def _lost(self, probabilities: Sequence[float], trial: Sequence[int], best: Sequence[int]) -> float:
        """The seconds that a step takes longer with the drafts `trial` than `best` would need for as many tokens."""
        tokens, seconds = expected(probabilities, trial, self.costs)
        best_tokens, best_seconds = expected(probabilities, best, self.costs)
        needed = tokens * best_seconds / best_tokens
        return max(0.0, seconds - needed)

    def spend(self, seconds: float) -> bool:
        """Take the time for a trial from what was saved. False: it is not enough."""
        if seconds > self._saved:
            return False
        self._saved -= seconds
        return True

    def spend_on(self, num_tokens: int) -> bool:
        """The same for so many tokens of a drafter."""
        return self.spend(self._seconds_of(num_tokens))

    def may_pay(self, num_requests: int) -> bool:
        """Whether drafts would pay in a batch of this size if they were right often."""
        found = self._may_pay.get(num_requests)
        if found is None:
            most = [self._num_speculative_tokens] * num_requests
            often = [_OFTEN] * num_requests
            found = any(best_num_drafts(often, most, self.costs))
            self._may_pay[num_requests] = found
        return found

    def num_tokens_behind(self, num_requests: int) -> int:
        """How many tokens a drafter may compute in a step beside those of the step: they take half of a step's time."""
        amounts = 2 ** np.arange(4, 13)
        seconds = self.costs.draft(amounts)
        alone = self.costs.step([num_requests])[0]
        allowed = amounts[seconds <= alone / 2]
        return int(allowed.max(initial=amounts[0]))

    def _seconds_of(self, num_tokens: int) -> float:
        if not num_tokens:
            return 0.0
        return float(self.costs.draft([num_tokens])[0])


def _clipped(probabilities: Sequence[float]) -> npt.NDArray[np.float64]:
    given = np.array(probabilities, dtype=np.float64)
    return np.clip(given, 1e-9, 1 - 1e-9)
