"""`AdaptiveProposer`: a request gets as many drafts as pay, by how many of its drafts were right."""

from __future__ import annotations

import numpy as np

from inflight.config.speculative import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.spec_decode.adaptive import AdaptiveProposer, Match
from tests.support.plans import new_request

K = 4
CONFIG = SpeculativeConfig(num_speculative_tokens=K)


class Scripted(AdaptiveProposer):
    """Its drafts are the position of each token. After a match of `length` tokens."""

    length = 3

    def find(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> list[Match]:
        return [Match(self.length, list(range(begin, begin + K))) for begin in num_tokens.tolist()]


class Text:
    """A sequence whose token at a position is the position, where a draft is right, and 0 elsewhere."""

    def __init__(self, proposer: AdaptiveProposer, num_slots: int = 1) -> None:
        self.proposer, self.slots = proposer, np.arange(num_slots, dtype=np.int32)
        self.token_ids = np.zeros((num_slots, 4000), dtype=np.int32)
        self.num_tokens = np.ones(num_slots, dtype=np.int32)

    def step(self, *rights: float) -> list[int]:
        """`rights`: of each slot, how often a draft is right. Returns how many drafts each slot got."""
        drafts = self.proposer.propose(self.token_ids, self.slots, self.num_tokens)
        counts = (drafts >= 0).sum(axis=1)
        for slot, right in zip(self.slots, rights, strict=True):
            for _ in range(counts[slot] + 1):
                position = self.num_tokens[slot]
                is_right = int(position * right) > int((position - 1) * right)
                self.token_ids[slot, position] = position if is_right else 0
                self.num_tokens[slot] += 1
                if not is_right:
                    break
        found: list[int] = counts.tolist()
        return found


def test_a_request_whose_drafts_are_never_right_soon_gets_none_and_gets_them_again_when_they_are() -> None:
    text = Text(Scripted(CONFIG, "cpu"))
    assert text.step(0.0) == [3]  # nothing is known yet: half of the drafts are expected to be right
    assert [text.step(0.0) for _ in range(60)][-1] == [0]
    counts = [text.step(1.0)[0] for _ in range(40)]
    assert counts[0] == 0 and counts[-1] == K and counts == sorted(counts)


def test_each_request_has_its_own_number() -> None:
    text = Text(Scripted(CONFIG, "cpu"), num_slots=2)
    for _ in range(60):
        counts = text.step(0.0, 1.0)
    assert counts[0] == 0 and counts[1] > 1  # fewer than K: the other request would wait
    text.proposer.begin([new_request(0, [1])])  # another request has the slot now
    text.num_tokens[0] = 1
    assert text.step(0.0, 1.0)[0] > 0


def test_short_and_long_matches_are_counted_apart() -> None:
    proposer = Scripted(CONFIG, "cpu")
    text = Text(proposer)
    for _ in range(60):
        assert text.step(0.0) is not None
    proposer.length = 8
    assert text.step(0.0) == [3]


def test_on_a_gpu_drafts_pay_more_often_and_in_a_large_batch_less_often() -> None:
    def counts(device: str, num_slots: int) -> int:
        text = Text(Scripted(CONFIG, device), num_slots)
        return max([text.step(*[0.5] * num_slots) for _ in range(40)][-1])

    assert counts("cpu", 1) >= 2 and counts("cuda", 32) >= 2
    assert counts("cpu", 32) == 0


def test_no_requests() -> None:
    none = np.empty(0, dtype=np.int32)
    assert Scripted(CONFIG, "cpu").propose(np.zeros((1, 9), dtype=np.int32), none, none).shape == (0, K)
