"""`SuffixProposer` against its definition, written out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from inflight.config.speculative import SpeculativeConfig, resolve_speculative
from inflight.spec_decode import output_store, suffix
from inflight.spec_decode.adaptive import Match
from inflight.spec_decode.suffix import SuffixProposer
from tests.support.plans import new_request

MAX_MODEL_LEN = 200
STORE_BYTES = 1 << 18


def config_of(k: int = 6, **fields: Any) -> SpeculativeConfig:
    names = {f"suffix_decoding_{name}": value for name, value in fields.items()}
    config = resolve_speculative({"method": "suffix", "num_speculative_tokens": k, **names})
    assert config is not None
    return config


class Requests:
    """Sequences in slots, of which the proposer sees each step."""

    def __init__(self, config: SpeculativeConfig, num_slots: int = 3, max_model_len: int = MAX_MODEL_LEN) -> None:
        self.config = config
        self.proposer = SuffixProposer(config, "cpu", STORE_BYTES)
        self.token_ids = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.sequences: dict[int, list[int]] = {}
        self.ended: list[tuple[int, list[int]]] = []
        self.prompts: dict[int, int] = {}

    def begin(self, slot: int, prompt: list[int]) -> None:
        if slot in self.sequences:
            self.ended.append((self.prompts[slot], self.sequences[slot]))
        self.sequences[slot], self.prompts[slot] = list(prompt), len(prompt)
        self.proposer.begin([new_request(slot, prompt)])

    def draw(self, **tokens: list[int]) -> list[list[int]]:
        """`tokens`: s0=[...] for slot 0, ... Returns the drafts of these slots."""
        slots = [int(name[1:]) for name in tokens]
        for slot, drawn in zip(slots, tokens.values(), strict=True):
            self.sequences[slot] += drawn
            self.token_ids[slot, : len(self.sequences[slot])] = self.sequences[slot]
        lengths = np.array([len(self.sequences[slot]) for slot in slots], dtype=np.int32)
        found = self.proposer.find(self.token_ids, np.array(slots, dtype=np.int32), lengths)
        assert all(bool(match.following) == (match.length >= 2) for match in found)
        return [match.following for match in found]

    def wanted(self, slot: int) -> list[int]:
        """The drafts by the definition. Of places with equal texts before and behind them the order does not matter."""
        tokens, config = self.sequences[slot], self.config
        depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
        places = [(tokens[:end], tokens[end:]) for end in range(len(tokens) - 1, 1, -1)]
        if config.suffix_decoding_max_cached_requests:
            others = [(self.prompts[s], known) for s, known in self.sequences.items() if s != slot] + self.ended
            places += [(known[:end], known[end:]) for begin, known in others for end in range(begin, len(known))]
        matches = [
            (length, behind) for before, behind in places if (length := common_end(before, tokens, depth - 1)) >= 2
        ]
        room = min(config.num_speculative_tokens, MAX_MODEL_LEN - len(tokens) - 1)
        best, most_expected = list[int](), 0.0
        for length in sorted({length for length, _ in matches}, reverse=True):
            most = max(min(int(factor * m), depth - m) for m in range(1, length + 1))
            texts = [behind for size, behind in matches if size >= length]
            drafts, expected, probability = list[int](), 0.0, 1.0
            while len(drafts) < min(most, room):
                votes = Counter(
                    text[len(drafts)] for text in texts if text[: len(drafts)] == drafts and text[len(drafts) :]
                )
                ranking = votes.most_common(2)
                if not ranking:
                    break
                if len(ranking) == 2 and ranking[0][1] == ranking[1][1]:
                    reject()  # the order of the places decides
                probability *= ranking[0][1] / votes.total()
                if probability < config.suffix_decoding_min_token_prob:
                    break
                drafts.append(ranking[0][0])
                expected += probability
            if expected > most_expected + 1e-9:
                best, most_expected = drafts, expected
        return best


def common_end(one: list[int], other: list[int], most: int) -> int:
    length = 0
    while length < min(len(one), len(other), most) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def test_what_followed_in_another_output_is_proposed_with_its_first_token() -> None:
    requests = Requests(config_of())
    requests.begin(0, [50, 51, 1, 2, 3])
    requests.draw(s0=[10])
    requests.draw(s0=[11, 12])
    requests.draw(s0=[13, 14, 15, 16, 17])
    requests.begin(1, [60, 61, 1, 2, 3])
    assert requests.draw(s1=[10]) == [[11, 12, 13, 14]]  # after a match of four tokens
    assert requests.draw(s1=[11, 12]) == [[13, 14, 15, 16, 17]]


def test_a_prompt_of_another_request_is_not_proposed() -> None:
    requests = Requests(config_of())
    requests.begin(0, [1, 2, 3, 4, 5])
    requests.draw(s0=[9])
    requests.begin(1, [7, 1, 2])
    assert requests.draw(s1=[3]) == [[]]
    requests.begin(2, [1, 2, 3, 4, 5, 8, 1, 2])  # but a prompt of its own is
    assert requests.draw(s2=[3]) == [[4, 5, 8]]


def test_the_majority_is_proposed_up_to_the_smallest_probability() -> None:
    requests = Requests(config_of(min_token_prob=0.6), num_slots=5)
    for slot, output in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8])):
        requests.begin(slot, [9])
        requests.draw(**{f"s{slot}": output})
    requests.begin(3, [0, 1, 2])
    assert requests.draw(s3=[3]) == [[4]]  # 2 of 3 times; then 5 in 1 of 3


def test_the_number_of_drafts_follows_the_length_of_the_match() -> None:
    for factor, count in ((0.5, 2), (1.0, 4), (1.5, 6)):
        requests = Requests(config_of(k=8, max_spec_factor=factor))
        requests.begin(0, [*range(20), 30, 0, 1, 2])
        assert requests.draw(s0=[3]) == [list(range(4, 4 + count))]
    requests = Requests(config_of(k=8, max_tree_depth=10, max_spec_factor=1.0))
    requests.begin(0, [*range(20), 30, *range(9)])
    assert requests.draw(s0=[9]) == [list(range(10, 15))]  # 5 tokens of a match and 5 drafts


def test_without_a_store_only_the_sequence_itself_is_known() -> None:
    requests = Requests(config_of(max_cached_requests=0))
    requests.begin(0, [9])
    requests.draw(s0=[1, 2, 3, 4])
    requests.begin(1, [1])
    assert requests.draw(s1=[2]) == [[]]
    assert requests.draw(s1=[8, 1, 2]) == [[8, 1]]


def test_the_draw_behind_the_last_draft_has_its_place() -> None:
    found = []
    for size in range(9, 14):
        requests = Requests(config_of(), max_model_len=size)
        requests.begin(0, [1, 2, 3, 4, 1, 2, 3])
        found.append(len(requests.draw(s0=[4])[0]))
    assert found == [0, 1, 2, 3, 4]


@pytest.fixture
def all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_store, "NUM_NEWEST", 10_000)
    monkeypatch.setattr(suffix, "MAX_OWN_MATCHES", 10_000)
    monkeypatch.setattr(suffix, "_MAX_COMPARED", 10_000)


@pytest.mark.usefixtures("all_places")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(
    data=st.data(),
    k=st.integers(1, 9),
    depth=st.integers(3, 12),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    least=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    cached=st.sampled_from([0, 1000]),
)
def test_against_the_definition(
    data: st.DataObject, k: int, depth: int, factor: float, least: float, cached: int
) -> None:
    config = config_of(
        k, max_tree_depth=depth, max_spec_factor=factor, min_token_prob=least, max_cached_requests=cached
    )
    requests = Requests(config)
    tokens = st.lists(st.integers(0, data.draw(st.integers(1, 5))), min_size=1, max_size=9)
    for slot in range(3):
        requests.begin(slot, data.draw(tokens))
    for _ in range(data.draw(st.integers(1, 10))):
        slot = data.draw(st.integers(0, 2))
        if len(requests.sequences[slot]) > 60 or data.draw(st.integers(0, 5)) == 0:
            requests.begin(slot, data.draw(tokens))
        [drafts] = requests.draw(**{f"s{slot}": data.draw(tokens)})
    assert drafts == requests.wanted(slot)


@given(tokens=st.lists(st.integers(0, 2), min_size=100, max_size=190), k=st.integers(1, 6))
def test_of_many_places_in_the_sequence_the_longest_matches_are_found(tokens: list[int], k: int) -> None:
    proposer = SuffixProposer(config_of(k), "cpu", STORE_BYTES)
    found = proposer._own_matches(0, np.array(tokens, dtype=np.int32))
    places = [(common_end(tokens[:end], tokens, 23), end) for end in range(2, len(tokens))]
    wanted = sorted([place for place in places if place[0] >= 2], reverse=True)[: suffix.MAX_OWN_MATCHES]
    assert found == [Match(length, tokens[end : end + k]) for length, end in wanted[: len(found)]]
    assert bool(found) == bool(wanted)
