"""Two ways in turns: their order from round to round, and their ratio."""

from __future__ import annotations

from benchmarks.shared.in_turns import compare_in_turns


def test_rounds_change_their_order_and_the_first_does_not_count() -> None:
    calls: list[str] = []

    def side(name: str, speeds: list[float]) -> float:
        calls.append(name)
        return speeds.pop(0)

    first, second = [1.0, 10.0, 20.0], [1000.0, 20.0, 40.0]
    row = compare_in_turns("test", "case", lambda: side("a", first), lambda: side("b", second), 2)
    assert row == ["case", "15.0", "30.0", "2.00 (2.00-2.00)"]
    assert calls == ["b", "a", "a", "b", "b", "a"]
