"""The order of the tests: nothing is lost, files stay together, and the shares of the workers take about the same time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.spread import spread

FILES = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.0, 1.0, 6.0, 40.0, 200.0])), min_size=1, max_size=40)


@given(FILES, st.integers(1, 8))
def test_every_test_runs_once_and_files_stay_together(files: list[tuple[int, float]], num_workers: int) -> None:
    items = [(f"f{index}", (index, number)) for index, (count, _) in enumerate(files) for number in range(count)]
    seconds = {f"f{index}": each for index, (_, each) in enumerate(files)}
    found = spread(items, seconds, num_workers)
    assert sorted(found) == [item for _, item in items]
    changes = sum(one[0] != two[0] for one, two in pairwise(found))
    assert changes <= len(files) - 1 + num_workers, "a file is cut only at the end of a worker's share"


def test_long_files_begin_in_different_workers() -> None:
    items = [(name, (name, number)) for name in "abcdefgh" for number in range(10)]
    found = spread(items, {"a": 100.0, "b": 90.0, "c": 50.0, "d": 60.0}, 2)
    assert [item[0] for item in found[:10]] == ["a"] * 10
    assert [item[0] for item in found[40:50]] == ["b"] * 10
    halves = [
        sum({"a": 10.0, "b": 9.0, "c": 5.0, "d": 6.0}.get(name, 0.0) for name, _ in half)
        for half in (found[:40], found[40:])
    ]
    assert halves == [150.0, 150.0]
