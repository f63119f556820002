"""The covering array holds every combination that it can, in few rows; checked by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering_array import Row, covering_array


def combinations_of(rows: Sequence[Row], strength: int) -> set[frozenset[tuple[str, Hashable]]]:
    return {frozenset(chosen) for row in rows for chosen in itertools.combinations(row.items(), strength)}


def allowed_rows(factors: Mapping[str, Sequence[Hashable]], is_allowed: Callable[[Row], bool]) -> list[Row]:
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if is_allowed(row)]


@given(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=6), strength=st.integers(1, 3), data=st.data())
def test_every_combination_that_can_be_is_in_a_row(sizes: list[int], strength: int, data: st.DataObject) -> None:
    factors = {f"f{i}": list(range(size)) for i, size in enumerate(sizes)}
    pairs = st.tuples(st.sampled_from(list(factors)), st.integers(0, 3))
    forbidden = data.draw(st.lists(st.lists(pairs, min_size=1, max_size=3), max_size=4))

    def is_allowed(row: Row) -> bool:
        return not any(all(row.get(name) == value for name, value in together) for together in forbidden)

    rows = covering_array(factors, strength, is_allowed)
    assert all(list(row) == list(factors) and is_allowed(row) for row in rows)
    possible = allowed_rows(factors, is_allowed)
    assert combinations_of(rows, strength) == combinations_of(possible, strength)
    assert len(rows) <= len(possible)


def test_few_rows_are_enough() -> None:
    """The least that is known: 2^13 in strength 3 has 16 rows or more; with a factor of 6 values, 24 or more."""
    switches: dict[str, Sequence[Hashable]] = {f"s{i}": [False, True] for i in range(13)}
    assert len(covering_array(switches)) <= 28
    assert len(covering_array({**switches, "kind": list("abcdef")})) <= 60
    assert covering_array(switches) == covering_array(switches)
    assert covering_array(switches) != covering_array(switches, seed=1)
