"""`AdaptiveProposer`: a proposer whose number of drafts follows how many of each request's drafts were right.

To verify a draft costs time, even if it is wrong. So a request gets only as many drafts as pay for the whole batch
(`DraftChoice`). The number can be 0: then drafts cost the request nothing.

How often drafts are right is counted for each request, separately for short and long matches. The drafts that a request did
not get are counted, too: when its tokens are known, they show whether the drafts would have been right. So a request that has
no drafts gets them again as soon as they would be right often enough, without a trial that costs time.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inflight.config.speculative import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.spec_decode.acceptance import Acceptance
from inflight.spec_decode.draft_choice import DraftChoice
from inflight.spec_decode.draft_costs import FREE_TOKENS, DraftCosts
from inflight.spec_decode.proposer import NO_TOKEN, Proposer

NUM_CLASSES = 7  # of lengths of matches: 1, 2 to 3, 4 to 7, ..., 64 or more


@dataclass(slots=True)
class Match:
    """A place in a known text: the `length` tokens before it equal the last tokens of the sequence, and the tokens `following`
    it may be drafts."""

    length: int
    following: list[int]


@dataclass(slots=True)
class _Guess:
    """All drafts that were found for a request, also those that it did not get. `begin`: the position of the first one."""

    begin: int
    kind: int
    drafts: list[int]


class AdaptiveProposer(Proposer):
    """
    Args:
        device: "cpu" or "cuda".

    Attributes:
        choice: its costs may be replaced by what was measured.
    """

    def __init__(self, config: SpeculativeConfig, device: str) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self.choice = DraftChoice(DraftCosts(FREE_TOKENS[device]), self.num_speculative_tokens)
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
                tokens = token_ids[slot, guess.begin : length]
                self._learn(slot, guess, tokens.tolist())
        probabilities = list[float]()
        found = list[int]()
        matches = self.find(token_ids, slots, num_tokens)
        for (slot, length), match in zip(rows, matches, strict=True):
            found.append(len(match.following))
            if match.following:
                kind = match.length.bit_length() - 1
                self._guesses[slot] = _Guess(length, kind, match.following)
                probabilities.append(self._acceptance.probability(slot, kind))
            else:
                probabilities.append(0.0)
        drafts = np.full((len(slots), self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        if any(found):
            for row, count in enumerate(self.choice.counts(probabilities, found)):
                drafts[row, :count] = matches[row].following[:count]
        return drafts

    def _learn(self, slot: int, guess: _Guess, tokens: list[int]) -> None:
        most = min(len(tokens), len(guess.drafts))
        right = 0
        while right < most and tokens[right] == guess.drafts[right]:
            right += 1
        compared = min(right + 1, most)
        self._acceptance.add(slot, right, compared, guess.kind)
