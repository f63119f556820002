"""A row of the table says whether its bar is reached, and what a slow tier takes is counted as the engine reads."""

from __future__ import annotations

from benchmarks.kv_tiers.setting import Row
from benchmarks.kv_tiers.slow_tier import num_waits
from inflight.kv_connector.rank_transfers import NUM_FETCH_THREADS


def test_a_bar_is_for_the_median() -> None:
    assert Row("a", [0.02, 0.04, 9.0], 0.05).cells() == ["a", "0.04", "0.02-9", "<= 0.05", "yes", ""]
    assert Row("a", [0.02, 0.06, 0.07], 0.05).cells() == ["a", "0.06", "0.02-0.07", "<= 0.05", "NO", ""]
    assert Row("a", [0.7], 0.7, False).cells() == ["a", "0.7", "", ">= 0.7", "yes", ""]
    assert Row("a", [0.6], 0.7, False).is_reached is False


def test_what_was_not_measured_has_reached_nothing() -> None:
    assert Row("a", bar=0.7, note="no Redis").cells() == ["a", "", "", "<= 0.7", "", "no Redis"]
    assert Row("a", [3.0]).is_reached is None


def test_reads_one_after_another() -> None:
    assert NUM_FETCH_THREADS == 4, "the figures below are for four threads"
    assert num_waits(1) == 1
    assert num_waits(2 + 4 + 8) == 1 + 1 + 2, "chunks of 2, 4 and 8 blocks wait for each other"
    assert num_waits(2 + 4 + 8 + 3) == 5
    assert num_waits(255) == 1 + 1 + 2 + 4 + 8 + 16 + 16 + 16 + 1, "no chunk has more than 64"
