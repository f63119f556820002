"""12.0 is an integer."""

from __future__ import annotations

from inflight.entrypoints.whole_numbers import as_integers


def test_whole_floats_are_integers() -> None:
    assert as_integers(12.0) == 12 and isinstance(as_integers(12.0), int)
    nested = as_integers([1.0, [2e3], "3.0", None, True])
    assert nested == [1, [2000], "3.0", None, True] and isinstance(nested, list) and isinstance(nested[0], int)


def test_other_values_stay() -> None:
    for value in (12.5, float("inf"), float("nan"), "12.0", True, None, {"a": 1.0}, [], [1, 2]):
        assert as_integers(value) is value
