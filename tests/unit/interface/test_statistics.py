"""`FaultStatus`: the counts of processes that were lost are kept. `StepCounts`: sums and differences."""

from __future__ import annotations

from dataclasses import fields

import pytest

from inflight.interface.statistics import FaultState, FaultStatus, StepCounts, TransferCounts

PAST = FaultStatus(
    epoch=3,
    num_recoveries={"rank_died": 2, "engine_died": 1},
    last_cause="a rank died",
    last_kind="rank_died",
    last_recovery_seconds=1.5,
    num_stale_frames=4,
    num_resumed_requests=5,
)


def test_a_process_without_faults_shows_those_before_it() -> None:
    assert FaultStatus().after(PAST) == PAST


def test_counts_are_added_and_the_newest_fault_is_the_last_one() -> None:
    present = FaultStatus(
        state="recovering",
        epoch=1,
        num_recoveries={"rank_died": 1, "rank_hung": 1},
        last_cause="a rank hung",
        last_kind="rank_hung",
        last_recovery_seconds=0.5,
        num_stale_frames=1,
        num_resumed_requests=1,
        spare_workers=2,
    )
    assert present.after(PAST) == FaultStatus(
        state="recovering",
        epoch=4,
        num_recoveries={"rank_died": 3, "engine_died": 1, "rank_hung": 1},
        last_cause="a rank hung",
        last_kind="rank_hung",
        last_recovery_seconds=0.5,
        num_stale_frames=5,
        num_resumed_requests=6,
        spare_workers=2,
    )


def test_counts_of_all_kinds_are_added_and_subtracted() -> None:
    first, both = StepCounts(*range(1, 9), accepted_at=(3,)), StepCounts(*range(11, 91, 10), accepted_at=(8, 2))
    assert first + StepCounts(*range(10, 82, 9), accepted_at=(5, 2)) == both != first
    assert both - first == StepCounts(*range(10, 82, 9), accepted_at=(5, 2))
    for num_drafts, num_accepted in ((3, 0), (3, 2), (0, 0), (1, 1)):
        first.record_drafts(num_drafts, num_accepted)
    assert first == StepCounts(1, 2, 3, 4, 5, 9, 14, 11, accepted_at=(5, 1))
    assert StepCounts(num_queried_tokens=9, num_hit_tokens=4).num_computed_prompt_tokens == 5


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        (("healthy", "recovering", "failed"), "recovering"),
        (("failed", "healthy"), "healthy"),
        (("failed", "failed"), "failed"),
        (("recovering",), "recovering"),
    ],
)
def test_replicas_together(states: tuple[FaultState, ...], whole: FaultState) -> None:
    assert FaultStatus.of_replicas([FaultStatus(state=state) for state in states]) == FaultStatus(state=whole)


def test_counts_of_replicas_are_added_but_those_that_each_has_counted() -> None:
    replicas = [
        FaultStatus(epoch=1, num_recoveries={"rank_died": 2, "front_end_died": 3}, last_cause="a", spare_workers=1),
        FaultStatus(epoch=2, num_recoveries={"rank_died": 1, "front_end_died": 4}, last_cause="b", spare_workers=2),
        FaultStatus(num_stale_frames=5, num_resumed_requests=6, spare_workers=4),
    ]
    assert FaultStatus.of_replicas(replicas) == FaultStatus(
        epoch=3,
        num_recoveries={"rank_died": 3, "front_end_died": 4},
        last_cause="b",
        num_stale_frames=5,
        num_resumed_requests=6,
        spare_workers=7,
    )
    assert replicas[0].num_recoveries == {"rank_died": 2, "front_end_died": 3}


def test_deaths_of_front_ends_are_the_last_fault() -> None:
    status = PAST.with_dead_front_ends(2)
    assert status.num_recoveries == {"rank_died": 2, "engine_died": 1, "front_end_died": 2}
    assert (status.last_cause, status.last_kind, status.epoch) == ("2 front ends have died", "front_end_died", 3)
    assert "front_end_died" not in PAST.num_recoveries


def test_counts_of_tiers_are_added_over_ranks() -> None:
    counts = TransferCounts()
    counts.add_tiers([{"disk": {"reads": 1, "writes": 2}}, {"disk": {"reads": 3}, "peer": {"reads": 4}}])
    counts.add_tiers([{"disk": {"refused": 5, "reads": 6}}])
    assert counts.tiers == {"disk": {"reads": 10, "writes": 2, "refused": 5}, "peer": {"reads": 4}}
    assert TransferCounts().tiers == {}


def test_nothing_is_counted_at_first() -> None:
    assert StepCounts() == StepCounts(*[0] * 8) and StepCounts().num_computed_prompt_tokens == 0
    assert (FaultStatus().state, FaultStatus().epoch, FaultStatus().num_recoveries) == ("healthy", 0, {})
    empty = TransferCounts()
    assert all(not getattr(empty, field.name) for field in fields(TransferCounts))


def test_transfers_of_two_reports_are_added() -> None:
    first, second = TransferCounts(*range(1, 13)), TransferCounts(*range(10, 130, 10))
    first.add_tiers([{"disk": {"reads": 2.0}}])
    second.add_tiers([{"disk": {"reads": 3.0, "writes": 1.0}, "peer": {"reads": 4.0}}])
    total = first + second
    assert total == TransferCounts(*range(11, 133, 11), {"disk": {"reads": 5.0, "writes": 1.0}, "peer": {"reads": 4.0}})
    assert (first.tiers, second.num_queried_tokens) == ({"disk": {"reads": 2.0}}, 10)
