"""`AdaptiveProposer`: a proposer whose number of drafts follows how many of each request's drafts were right.

To verify a draft costs time, even if it is wrong. So a request gets only as many drafts as are expected to give the whole batch
more tokens per second. No drafts are a choice, too: then the request pays nothing.

How often drafts are right is counted for each request, separately for short and long matches. The drafts that a request did
not get are counted, too: when its tokens are known, they show whether the drafts would have been right. So a request that has
no drafts gets them again as soon as they would be right often enough, without a trial that costs time.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inflight.config.speculative import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.spec_decode.acceptance import Acceptance
from inflight.spec_decode.draft_costs import FREE_TOKENS, DraftCosts
from inflight.spec_decode.proposer import NO_TOKEN, Proposer

NUM_CLASSES = 7  # of lengths of matches: 1, 2 to 3, 4 to 7, ..., 64 or more


@dataclass(slots=True)
class Match:
    """A place in a known text: `length` tokens before it are the last tokens of the sequence, and `following` are tokens behind
    it, which may be drafts."""

    length: int
    following: list[int]


@dataclass(slots=True)
class _Guess:
    """The drafts that were found for a request, those that it did not get included. `begin`: the position of the first."""

    begin: int
    kind: int
    drafts: list[int]


class AdaptiveProposer(Proposer):
    """
    Args:
        device: "cpu" or "cuda".

    Attributes:
        costs: may be replaced by what was measured.
    """

    def __init__(self, config: SpeculativeConfig, device: str) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self.costs = DraftCosts(FREE_TOKENS[device])
        self._acceptance = Acceptance(right=1.0, compared=2.0, num_kinds=NUM_CLASSES)
        self._guesses: dict[int, _Guess] = {}  # by slot

    @abstractmethod
    def find(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> list[Match]:
        """Find drafts. The arguments are those of `propose`. Returns for each request what may follow its tokens: at most
        `num_speculative_tokens` tokens, so that one more token has a place. If nothing is found, the length is 0."""

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        self._acceptance.forget(data.slot for data in requests)
        for data in requests:
            self._guesses.pop(data.slot, None)

    def propose(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        rows = list(zip(slots.tolist(), num_tokens.tolist(), strict=True))
        for slot, length in rows:
            guess = self._guesses.pop(slot, None)
            if guess is not None:
                self._learn(slot, guess, token_ids[slot, guess.begin : length].tolist())
        probabilities = list[float]()
        found = list[int]()
        matches = self.find(token_ids, slots, num_tokens)
        for (slot, length), match in zip(rows, matches, strict=True):
            found.append(len(match.following))
            if match.following:
                guess = self._guesses[slot] = _Guess(length, match.length.bit_length() - 1, match.following)
                probabilities.append(self._acceptance.probability(slot, guess.kind))
            else:
                probabilities.append(0.0)
        drafts = np.full((len(slots), self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        if any(found):
            for row, count in enumerate(best_num_drafts(probabilities, found, self.costs.free_tokens)):
                drafts[row, :count] = matches[row].following[:count]
        return drafts

    def _learn(self, slot: int, guess: _Guess, tokens: list[int]) -> None:
        most = min(len(tokens), len(guess.drafts))
        right = 0
        while right < most and tokens[right] == guess.drafts[right]:
            right += 1
        compared = min(right + 1, most)
        self._acceptance.add(slot, right, compared, guess.kind)


def best_num_drafts(probabilities: Sequence[float], most: Sequence[int], free_tokens: float) -> list[int]:
    """Returns for each request the number of drafts with which a step is expected to give the most tokens per second.

    A step of N tokens takes a time in proportion to `free_tokens` + N. The draft number i of a request is right with the
    probability p^i. It pays if the step gives fewer than p^i tokens in the time that one more token takes. So the best numbers
    are found in rounds, each with the tokens per time of the round before (Dinkelbach's method).

    Args:
        probabilities: [n], of a request's drafts: that one is right if those before it are.
        most: [n], how many drafts there are.
    """
    n = len(probabilities)
    logs = [math.log(p) for p in _clipped(probabilities)]
    chosen = [0] * n
    tokens_per_time = n / (free_tokens + n)
    for _ in range(3):
        log = math.log(tokens_per_time)
        chosen = [min(int(log / each), limit) for each, limit in zip(logs, most, strict=True)]
        tokens_per_time = (n + expected_right(probabilities, chosen)) / (free_tokens + n + sum(chosen))
    return chosen


def best_num_passes(
    probabilities: Sequence[float], most: Sequence[int], free_tokens: float, share_of_step: float
) -> list[int]:
    """The same for drafts of a model, which computes one draft of each request in a pass. `share_of_step`: the time of a pass /
    the time of a step of the served model with as many tokens."""
    n = len(probabilities)
    best, best_rate = [0] * n, n / (free_tokens + n)
    for num_passes in range(1, max(most, default=0) + 1):
        chosen = best_num_drafts(probabilities, [min(num_passes, limit) for limit in most], free_tokens)
        seconds = free_tokens + n + sum(chosen) + max(chosen) * share_of_step * (free_tokens + n)
        rate = (n + expected_right(probabilities, chosen)) / seconds
        if rate > best_rate:
            best, best_rate = chosen, rate
    return best


def fewest_right(most: int, costs: DraftCosts) -> float | None:
    """How often drafts must be right to pay for one request that may have `most` of them, in steps of 0.05. None: they never
    pay."""
    shares = (0.05 * each for each in range(1, 21))
    choose = best_num_passes
    return next((p for p in shares if any(choose([p], [most], costs.free_tokens, costs.share_of_step))), None)


def expected_right(probabilities: Sequence[float], counts: Sequence[int]) -> float:
    """How many drafts are expected to be right, if each request has so many."""
    clipped = _clipped(probabilities)
    return sum(p * (1 - p**count) / (1 - p) for p, count in zip(clipped, counts, strict=True))


def _clipped(probabilities: Sequence[float]) -> list[float]:
    return [min(max(p, 1e-9), 1 - 1e-9) for p in probabilities]
