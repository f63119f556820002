"""`FaultStatus`: the counts of processes that were lost are kept. `StepCounts`: sums and differences."""

from __future__ import annotations

from inflight.interface.statistics import FaultStatus, StepCounts

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
