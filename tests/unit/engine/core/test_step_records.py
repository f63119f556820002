"""What `StepRecords` reports, and what it writes into the timeline."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from inflight.engine.core import step_records
from inflight.engine.core.step_records import StepRecords
from inflight.interface.statistics import SchedulerStats, StepCounts, TransferCounts
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.timeline import Event


class Recorded:
    """`StepRecords` of a scheduler whose numbers the test sets. `now`: what the clock shows, in nanoseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000
        monkeypatch.setattr(step_records, "time", SimpleNamespace(perf_counter_ns=lambda: self.now))
        self.has_requests = False
        self.scheduler = SimpleNamespace(
            has_unfinished_requests=lambda: self.has_requests,
            stats=StepCounts(num_sampled_tokens=3),
            num_running=4,
            num_waiting=5,
            num_waiting_tokens=6,
            num_running_tokens=7,
            transfers=SimpleNamespace(take_counts=lambda: TransferCounts(num_late=8)),
        )
        self.records = StepRecords(cast("Any", self.scheduler), cast("Any", SimpleNamespace(usage=0.5)))

    def submit(self, step_id: int, num_tokens: int, planned_at_ns: int) -> None:
        empty = np.zeros(0, dtype=np.int32)
        plan = SchedulerOutput(
            step_id=step_id,
            new_requests=(),
            request_ids=(),
            slots=empty,
            num_computed_tokens=empty,
            num_scheduled_tokens=np.array([num_tokens], dtype=np.int32),
            samples=np.zeros(0, dtype=np.bool_),
            block_table_deltas=(),
        )
        self.records.submitted(plan, Future(), planned_at_ns)

    def commit(self, step_id: int, last_step: tuple[float, float] | None, *, shares_cores: bool = False) -> None:
        output = ModelRunnerOutput(step_id=step_id, shares_cores=shares_cores)
        self.records.committed(step_id, self.now - 50, last_step, output)


def test_a_report_has_what_came_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    assert recorded.records.take_stats().step_id == -1
    recorded.submit(1, 20, 1500)
    recorded.submit(2, 30, 1600)
    recorded.scheduler.stats = StepCounts(num_sampled_tokens=5, num_preemptions=1)
    recorded.commit(1, (0.010, 0.025), shares_cores=True)
    recorded.commit(2, None)
    recorded.commit(3, (0.010, 0.005), shares_cores=True)
    found = recorded.records.take_stats()
    assert found == SchedulerStats(
        step_id=3,
        num_running=4,
        num_waiting=5,
        num_waiting_tokens=6,
        num_running_tokens=7,
        kv_cache_usage=0.5,
        counts=StepCounts(num_sampled_tokens=2, num_preemptions=1),
        step_tokens=(20, 30),
        step_gaps=found.step_gaps,
        step_time_ratios=(2.5, 0.5),
        hidden_share=1.0,  # of the commits: a step ran
        shares_cores=True,
        transfers=TransferCounts(num_late=8),
    )
    assert len(found.step_gaps) == 1
    recorded.commit(4, None)
    later = recorded.records.take_stats()
    assert (later.counts, later.step_tokens, later.step_gaps, later.step_time_ratios) == (StepCounts(), (), (), ())
    assert (later.step_id, later.shares_cores) == (4, False)
    recorded.scheduler.stats.num_sampled_tokens += 1  # the scheduler goes on counting in the same object
    assert recorded.records.take_stats().counts == StepCounts(num_sampled_tokens=1)


def test_the_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    recorded.now = 1500
    recorded.records.note_idleness()  # it is idle since 1000 already
    recorded.now = 2000
    assert recorded.records.worked(1, "plan", 1900) == 2000
    recorded.has_requests = True
    recorded.submit(1, 4, 1900)
    recorded.now = 3000
    recorded.submit(2, 4, 2900)  # without idleness before it
    recorded.commit(1, (0.0101234, 0.02))
    recorded.commit(2, None)
    recorded.records.note_idleness()
    recorded.submit(3, 4, 3100)
    recorded.has_requests, recorded.now = False, 4000
    recorded.records.note_idleness()
    recorded.submit(4, 4, 4500)
    assert recorded.records.timeline.events() == [
        Event(1, "idle", 1000, 1900),
        Event(1, "plan", 1900, 2000),
        Event(1, "commit", 2950, 3000, {"predicted_ms": 10.123, "measured_ms": 20.0}),
        Event(2, "commit", 2950, 3000),
        Event(4, "idle", 4000, 4500),
    ]
