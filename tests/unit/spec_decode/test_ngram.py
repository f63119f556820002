"""`NgramProposer` against its definition, written out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.config.speculative import SpeculativeConfig
from inflight.spec_decode import ngram, sequence_index
from inflight.spec_decode.adaptive import Match
from inflight.spec_decode.ngram import NgramProposer
from tests.support.plans import new_request

CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4)


def drafts_of(tokens: list[int], config: SpeculativeConfig, max_model_len: int) -> list[int]:
    """One n-gram and one place at a time."""
    length = len(tokens)
    count = min(config.num_speculative_tokens, max_model_len - length - 1)
    for n in range(min(config.prompt_lookup_max, length - 1), config.prompt_lookup_min - 1, -1):
        behind = [end for end in range(n, length) if tokens[end - n : end] == tokens[length - n :]]
        if behind and count > 0:
            long = [end for end in behind if end + count <= length]
            begin = long[-1] if long else behind[0]
            return tokens[begin : begin + count]
    return []


def propose(tokens: list[int], config: SpeculativeConfig = CONFIG, max_model_len: int = 50) -> list[int]:
    """Of the request in slot 1 of 3; tokens beyond the known ones are like the known ones."""
    token_ids = np.resize(np.array(tokens, dtype=np.int32), (3, max_model_len))
    token_ids[1, : len(tokens)] = tokens
    token_ids.setflags(write=False)
    numbers = np.array([1], dtype=np.int32), np.array([len(tokens)], dtype=np.int32)
    [match] = NgramProposer(config, "cpu").find(token_ids, *numbers)
    assert len(match.following) <= config.num_speculative_tokens
    assert match == Match(0, []) or config.prompt_lookup_min <= match.length <= config.prompt_lookup_max
    return match.following


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1], []),
        ([1, 1], []),  # a 2-gram at least
        ([1, 2, 3, 4], []),
        ([1, 2, 9, 1, 2], [9, 1, 2]),
        ([1, 2, 8, 8, 1, 2, 9, 9, 1, 2], [9, 9, 1]),  # the latest of two
        ([7, 1, 2, 8, 8, 5, 1, 2, 9, 9, 7, 1, 2], [8, 8, 5]),  # but the longer one before the later one
        ([5, 6, 5, 6, 5, 6, 5, 6], [5, 6, 5]),  # not the very last, with two tokens behind it
        ([4, 4, 4, 4], [4]),  # 3-grams, of which the one before the last has one token behind it
        ([1, 2, 3, 1, 2, 3, 4, 1, 2, 3], [4, 1, 2]),
    ],
)
def test_by_hand(tokens: list[int], drafts: list[int]) -> None:
    assert propose(tokens) == drafts_of(tokens, CONFIG, 50) == drafts


@given(data=st.data(), lo=st.integers(1, 3), more=st.integers(0, 3), k=st.integers(1, 6), room=st.integers(0, 9))
def test_against_the_definition(data: st.DataObject, lo: int, more: int, k: int, room: int) -> None:
    config = dataclasses.replace(CONFIG, num_speculative_tokens=k, prompt_lookup_min=lo, prompt_lookup_max=lo + more)
    num_kinds = data.draw(st.integers(1, 4))
    tokens = data.draw(st.lists(st.integers(0, num_kinds - 1), min_size=1, max_size=40))
    assert propose(tokens, config, len(tokens) + room) == drafts_of(tokens, config, len(tokens) + room)


@pytest.fixture
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of test size are indexed, and looked at newest first."""
    monkeypatch.setattr(sequence_index, "MIN_INDEXED", 5)
    monkeypatch.setattr(ngram, "_RECENT", 2)


@pytest.mark.usefixtures("small_index")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data(), lo=st.integers(1, 3), more=st.integers(0, 2), k=st.integers(1, 5))
def test_sequences_that_grow_against_the_definition(data: st.DataObject, lo: int, more: int, k: int) -> None:
    """Two slots, whose sequences grow by some tokens from call to call, and which other requests get now and then."""
    config = dataclasses.replace(CONFIG, num_speculative_tokens=k, prompt_lookup_min=lo, prompt_lookup_max=lo + more)
    proposer, max_model_len = NgramProposer(config, "cpu"), 60
    # the second kind has the same last 20 bits as the first
    kinds = [1, 1 + (1 << 20), *range(2, data.draw(st.integers(2, 5)))]
    token_ids = np.zeros((2, max_model_len), dtype=np.int32)
    sequences: list[list[int]] = [[], []]
    for _ in range(data.draw(st.integers(1, 10))):
        for slot in range(2):
            if not sequences[slot] or len(sequences[slot]) > 40 or data.draw(st.integers(0, 9)) == 0:
                sequences[slot] = []
                proposer.begin([new_request(slot, [])])
            sequences[slot] += data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=9))
            token_ids[slot, : len(sequences[slot])] = sequences[slot]
        lengths = np.array([len(tokens) for tokens in sequences], dtype=np.int32)
        matches = proposer.find(token_ids, np.arange(2, dtype=np.int32), lengths)
        for tokens, match in zip(sequences, matches, strict=True):
            assert match.following == drafts_of(tokens, config, max_model_len)


def test_an_index_takes_8_bytes_a_token_and_goes_with_its_request() -> None:
    proposer = NgramProposer(CONFIG, "cpu")
    token_ids = np.random.default_rng(0).integers(0, 50, (1, 40_000)).astype(np.int32)

    def propose_at(*lengths: int) -> int:
        """The size of the index after that."""
        for length in lengths:
            proposer.propose(token_ids, np.zeros(1, dtype=np.int32), np.array([length], dtype=np.int32))
        return sum(index.entries.nbytes for index in proposer._indexes._indexes.values())

    assert propose_at(100, 10_000) == 0  # a pass is as fast
    assert propose_at(20_000, 20_001, 22_000) == 8 * 19_998  # few tokens came since: it is made once
    assert propose_at(30_000) == 8 * 29_998
    proposer.begin([new_request(0, [])])
    assert propose_at() == 0


def test_the_draw_behind_the_last_draft_has_its_place() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 4]
    assert [len(propose(tokens, max_model_len=size)) for size in range(8, 14)] == [0, 0, 1, 2, 3, 3]


def test_each_request_has_its_row_and_its_slot() -> None:
    token_ids = np.zeros((4, 20), dtype=np.int32)
    token_ids[3, :5], token_ids[0, :5] = [1, 2, 9, 1, 2], [1, 2, 3, 4, 5]
    token_ids[1, :7] = [6, 6, 7, 6, 6, 7, 6]
    matches = NgramProposer(CONFIG, "cpu").find(
        token_ids, np.array([3, 0, 1], dtype=np.int32), np.array([5, 5, 5], dtype=np.int32)
    )
    assert matches == [Match(2, [9, 1, 2]), Match(0, []), Match(2, [7, 6, 6])]


def test_no_requests() -> None:
    none = np.empty(0, dtype=np.int32)
    assert NgramProposer(CONFIG, "cpu").propose(np.zeros((2, 9), dtype=np.int32), none, none).shape == (0, 3)
