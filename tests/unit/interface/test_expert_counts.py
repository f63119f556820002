"""Counts of experts of several reports are added up."""

from inflight.interface.expert_counts import ExpertCounts, sum_of_experts


def test_counts_are_added_up() -> None:
    earlier, later = ExpertCounts(2, 10, 8, 1, 4, 0), ExpertCounts(2, 6, 4, 0, 0, 3)
    both = sum_of_experts(earlier, later)
    assert both == ExpertCounts(2, 16, 12, 1, 4, 3) and both.balance == 16 / 24
    assert sum_of_experts(None, later) == sum_of_experts(later, None) == later
    assert sum_of_experts(None, None) is None


def test_without_work_the_balance_is_not_known() -> None:
    assert ExpertCounts(4).balance is None
