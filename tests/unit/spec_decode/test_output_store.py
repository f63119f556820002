"""`OutputStore` against a list of all outputs, looked through one place at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.spec_decode import output_store
from inflight.spec_decode.output_store import CELL_BYTES, SEGMENT_SIZE, OutputStore

MAX_MODEL_LEN, NUM_SLOTS = 400, 3


@dataclass
class Known:
    """A sequence, and from which token on it was stored."""

    tokens: list[int]
    begin: int


@dataclass
class Bench:
    """A store, and beside it all sequences that it has seen."""

    store: OutputStore
    depth: int
    num_following: int
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros((NUM_SLOTS, MAX_MODEL_LEN), dtype=np.int32))
    slots: dict[int, Known] = field(default_factory=dict)
    all: list[Known] = field(default_factory=list)

    def begin(self, slot: int, tokens: list[int], salt: str = "") -> None:
        self.slots[slot] = Known(list(tokens), len(tokens))
        self.all.append(self.slots[slot])
        self.store.begin(slot, len(tokens), salt)

    def draw(self, *drawn: tuple[int, list[int]]) -> list[list[tuple[int, tuple[int, ...]]]]:
        """Adds tokens to slots. Returns the matches of these slots."""
        for slot, tokens in drawn:
            known = self.slots[slot]
            known.tokens += tokens
            self.token_ids[slot, : len(known.tokens)] = known.tokens
        slots = np.array([slot for slot, _ in drawn], dtype=np.int32)
        lengths = np.array([len(self.slots[slot].tokens) for slot, _ in drawn], dtype=np.int32)
        found = self.store.add_and_match(self.token_ids, slots, lengths)
        return [[(match.length, tuple(match.following)) for match in matches] for matches in found]

    def wanted(self, slot: int) -> Counter[tuple[int, tuple[int, ...]]]:
        tokens = self.slots[slot].tokens
        found = Counter[tuple[int, tuple[int, ...]]]()
        for other in self.all:
            for place in range(other.begin, len(other.tokens)) if other is not self.slots[slot] else ():
                length = 0
                while (
                    length < min(self.depth, place, len(tokens))
                    and other.tokens[place - 1 - length] == tokens[-1 - length]
                ):
                    length += 1
                if length >= 2:
                    found[length, tuple(other.tokens[place : place + self.num_following])] += 1
        return found


def make_bench(num_segments: int, *, depth: int = 9, num_following: int = 5, max_requests: int = 1000) -> Bench:
    store = OutputStore(num_segments * SEGMENT_SIZE * CELL_BYTES, max_requests, depth, num_following)
    return Bench(store, depth, num_following)


@pytest.fixture
def all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_store, "NUM_NEWEST", 10_000)


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[int, list[int], bool]]]:
    """Steps: slot, tokens, whether they are the prompt of a new request."""
    tokens = st.lists(st.integers(0, draw(st.integers(1, 4))), min_size=1, max_size=draw(st.sampled_from([3, 20, 70])))
    new = [[(slot, draw(tokens), True)] for slot in range(NUM_SLOTS)]
    slots = st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True)
    steps = [
        [(slot, draw(tokens), draw(st.integers(0, 5)) == 0) for slot in draw(slots)]
        for _ in range(draw(st.integers(1, 6)))
    ]
    return new + steps


def play(
    bench: Bench, history: list[list[tuple[int, list[int], bool]]]
) -> list[tuple[int, list[tuple[int, tuple[int, ...]]]]]:
    """Returns the matches of the last step, with the slots."""
    found: list[tuple[int, list[tuple[int, tuple[int, ...]]]]] = []
    for step in history:
        drawn = []
        for slot, tokens, is_new in step:
            if is_new or len(bench.slots[slot].tokens) + len(tokens) > MAX_MODEL_LEN:
                bench.begin(slot, tokens)
                drawn.append((slot, [0]))
            else:
                drawn.append((slot, tokens))
        found = list(zip([slot for slot, _ in drawn], bench.draw(*drawn), strict=True))
    return found


@pytest.mark.usefixtures("all_places")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(history=histories(), depth=st.integers(2, 20), num_following=st.integers(1, 70))
def test_all_places_are_found_while_nothing_is_dropped(
    history: list[list[tuple[int, list[int], bool]]], depth: int, num_following: int
) -> None:
    bench = make_bench(128, depth=depth, num_following=min(num_following, SEGMENT_SIZE))
    for slot, matches in play(bench, history):
        assert Counter(matches) == bench.wanted(slot)


@settings(max_examples=40)
@given(history=histories())
def test_what_a_full_store_finds_is_true(history: list[list[tuple[int, list[int], bool]]]) -> None:
    """Segments are taken again in the middle of outputs, so matches may be shorter, and have fewer tokens behind them."""
    bench = make_bench(4)
    for slot, matches in play(bench, history):
        true = bench.wanted(slot)
        for length, following in matches:
            assert any(length <= size and text[: len(following)] == following for size, text in true)


def test_the_newest_place_comes_first() -> None:
    bench = make_bench(16)
    for slot, behind in ((0, 7), (1, 8), (2, 9)):
        bench.begin(slot, [1, 2, 3])
        bench.draw((slot, [4, 5, behind]))
    bench.begin(0, [0, 4])
    assert bench.draw((0, [5])) == [[(2, (9,)), (2, (8,)), (2, (7,))]]


def test_what_a_preempted_request_draws_again_is_not_stored_twice() -> None:
    bench = make_bench(16)
    bench.begin(0, [1, 2])
    bench.draw((0, [3, 4, 5]))
    bench.begin(1, [1, 2, 3, 4, 5])  # the same request, in another slot
    bench.draw((1, [6, 7]))
    bench.begin(2, [9, 3])
    assert bench.draw((2, [4])) == [[(2, (5,))]]
    bench.begin(2, [9, 5])
    assert bench.draw((2, [6])) == [[(2, (7,))]]


def test_outputs_of_the_requests_that_began_last_are_found() -> None:
    bench = make_bench(16, max_requests=2)
    for slot, behind in ((0, 7), (1, 8)):
        bench.begin(slot, [1, 2])
        bench.draw((slot, [3, behind]))
    bench.begin(2, [0, 2])
    assert bench.draw((2, [3])) == [[(2, (8,))]]  # this request is the second


def test_only_requests_with_the_same_salt_find_an_output() -> None:
    bench = make_bench(16)
    for slot, (salt, behind) in enumerate({"": 7, "a": 8, "b": 9}.items()):
        bench.begin(slot, [1, 2], salt)
        bench.draw((slot, [3, behind]))
    for salt, behind in {"": 7, "a": 8, "b": 9}.items():
        bench.begin(0, [0, 2], salt)
        assert bench.draw((0, [3])) == [[(2, (behind,))]]


def test_the_size_is_bounded() -> None:
    store = OutputStore(1 << 20, 10, 8, 8)
    arrays = [store._tokens.data, store._heads, store._previous]
    assert 1 << 19 <= sum(each.nbytes for each in arrays) <= 1 << 20
