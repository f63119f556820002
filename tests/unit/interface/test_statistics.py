"""`FaultStatus`: the counts of processes that were lost are kept. `StepCounts`: sums and differences."""

from __future__ import annotations

from dataclasses import fields

from inflight.interface.statistics import FaultStatus, StepCounts, TransferCounts

PAST = FaultStatus(
    epoch=3,
    num_recoveries={"rank_died": 2, "engine_died": 1},
    last_cause="a rank died",
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
        last_recovery_seconds=0.5,
        num_stale_frames=5,
        num_resumed_requests=6,
        spare_workers=2,
    )


def test_counts_of_all_kinds_are_added_and_subtracted() -> None:
    first, both = StepCounts(*range(1, 8)), StepCounts(*range(11, 81, 10))
    assert first + StepCounts(*range(10, 73, 9)) == both != first
    assert both - first == StepCounts(*range(10, 73, 9))
    assert StepCounts(num_queried_tokens=9, num_hit_tokens=4).num_computed_prompt_tokens == 5


def test_nothing_is_counted_at_first() -> None:
    assert StepCounts() == StepCounts(*[0] * 7) and StepCounts().num_computed_prompt_tokens == 0
    assert (FaultStatus().state, FaultStatus().epoch, FaultStatus().num_recoveries) == ("healthy", 0, {})
    empty = TransferCounts()
    assert all(not getattr(empty, field.name) for field in fields(TransferCounts))


def test_the_counts_of_tiers_are_added_over_ranks() -> None:
    counts = TransferCounts()
    counts.add_tiers([{"fs": {"hits": 2, "bytes": 8}}, {"fs": {"hits": 3, "misses": 1}, "redis": {"hits": 1}}])
    counts.add_tiers([{"fs": {"misses": 4}}])
    assert counts.tiers == {"fs": {"hits": 5, "bytes": 8, "misses": 5}, "redis": {"hits": 1}}


def test_the_status_of_several_engines() -> None:
    """Recoveries are added; but the death of a front end is counted by each engine."""
    first = FaultStatus(
        state="healthy", epoch=2, num_recoveries={"rank_died": 2, "front_end_died": 1}, num_stale_frames=3
    )
    second = FaultStatus(
        state="failed", epoch=1, num_recoveries={"rank_died": 1, "front_end_died": 2}, num_stale_frames=4
    )
    whole = FaultStatus.of_replicas([first, second])
    assert whole.num_recoveries == {"rank_died": 3, "front_end_died": 2}
    assert (whole.state, whole.epoch, whole.num_stale_frames) == ("healthy", 3, 7)
    assert FaultStatus.of_replicas([second]).state == "failed"
    assert FaultStatus.of_replicas([first, second, FaultStatus(state="recovering")]).state == "recovering"
    spares = [FaultStatus(spare_workers=2), FaultStatus(spare_workers=1)]
    assert FaultStatus.of_replicas(spares).spare_workers == 3


def test_the_deaths_of_front_ends_are_faults() -> None:
    status = PAST.with_dead_front_ends(2)
    assert status.num_recoveries == {**PAST.num_recoveries, "front_end_died": 2}
    assert (status.last_kind, status.last_cause) == ("front_end_died", "2 front ends have died")
