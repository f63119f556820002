"""From speeds to the tables of `benchmarks.compare`."""

from __future__ import annotations

import pytest

from benchmarks.compare.table import Column, Pairs, Spread, markdown, table_rows


def test_ratios_are_of_one_round() -> None:
    pairs = Pairs(ours=[10, 20, 30], theirs=[10, 10, 10])
    assert pairs.ratio == Spread(2, 1, 3)
    assert str(pairs.ratio) == "2.00 (1.00-3.00)"
    # the machine slows down by half: every round has the same ratio, whatever the medians say
    assert Pairs(ours=[20, 10], theirs=[10, 5]).ratio == Spread(2, 2, 2)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        _ = Pairs(ours=[1, 2], theirs=[1]).ratio


def test_the_table_of_a_comparison() -> None:
    slow, fast = Pairs([10, 12, 14], [5, 6, 7]), Pairs([10, 12, 14], [20, 24, 28])
    columns = {
        "decode1": Column(ours=[10, 12, 14], peers={"a bf16": slow, "b bf16": fast}, roofline=48, goal=15),
        "prefill": Column(ours=[10, 12, 14], peers={"a bf16": slow, "b bf16": slow}, roofline=24, goal=None),
    }
    rows = {row[0]: row[1:] for row in table_rows("inflight bf16", columns)}
    assert rows["inflight bf16"] == ["12.0", "12.0"]
    assert rows["goal"] == ["15", ""]
    assert rows["ours / b bf16"] == ["0.50 (0.50-0.50)", "2.00 (2.00-2.00)"]
    assert rows["best peer"] == ["b bf16", "a bf16"]
    assert rows["ahead of it"] == ["NO", "yes"]
    assert rows["ours / roofline"] == ["25%", "50%"]
    alone = {"decode1": Column(ours=[1], peers={}, roofline=2, goal=None)}
    assert [row[0] for row in table_rows("inflight int4", alone)] == [
        "tokens/s", "roofline", "inflight int4", "ours / roofline",
    ]  # fmt: skip


def test_markdown() -> None:
    assert markdown([["x", "long"], ["longer", "1"]]) == "| x      | long |\n|--------|------|\n| longer | 1    |"
