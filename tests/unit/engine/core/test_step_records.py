"""`StepRecords`: what is in the timeline and in the statistics after steps."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.engine.core import step_clock, step_records
from inflight.engine.core.step_clock import MAX_GAPS
from inflight.engine.core.step_records import StepRecords
from inflight.interface.statistics import StepCounts, TransferCounts
from inflight.interface.step import ModelRunnerOutput


class Bench:
    """`now`: what the clock shows, in ns."""

    scheduler: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.has_requests = 10, False
        clock = SimpleNamespace(perf_counter_ns=lambda: self.now)
        for module in (step_clock, step_records):
            monkeypatch.setattr(module, "time", clock)
        self.scheduler = SimpleNamespace(
            has_unfinished_requests=lambda: self.has_requests,
            stats=StepCounts(),
            num_running=1,
            num_waiting=2,
            num_waiting_tokens=3,
            num_running_tokens=4,
            encoder=None,
            transfers=SimpleNamespace(take_counts=lambda: TransferCounts(num_failed=5)),
        )
        cache: Any = SimpleNamespace(usage=0.25)
        self.records = StepRecords(self.scheduler, cache)

    def submit(self, step_id: int, num_tokens: int, planned_at: int) -> Future[ModelRunnerOutput]:
        plan: Any = SimpleNamespace(step_id=step_id, num_tokens=num_tokens)
        future: Future[ModelRunnerOutput] = Future()
        self.records.submitted(plan, future, planned_at)
        return future

    def events(self) -> list[tuple[Any, ...]]:
        found = self.records.timeline.events()
        return [(each.step_id, each.phase, each.start_ns, each.end_ns, each.details) for each in found]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_the_time_without_requests_is_idle(bench: Bench) -> None:
    """From the start, and from when the last request has ended, up to the next plan; it is no gap between steps."""
    bench.has_requests = True
    bench.now = 100
    bench.submit(0, 5, 30).set_result(ModelRunnerOutput(step_id=0))
    bench.now = 150
    bench.records.record_idleness()  # there still are requests
    bench.submit(1, 5, 140).set_result(ModelRunnerOutput(step_id=1))
    bench.has_requests, bench.now = False, 300
    bench.records.record_idleness()
    bench.now = 400
    bench.records.record_idleness()  # nothing has changed
    bench.submit(2, 5, 900)
    assert bench.events() == [(0, "idle", 10, 30, None), (2, "idle", 300, 900, None)]
    assert bench.records.take_stats().step_gaps == (50 / 1e9,)


def test_a_commit_says_how_long_the_step_was_predicted_to_take(bench: Bench) -> None:
    bench.now = 70
    bench.records.committed(4, 60, (0.002, 0.0030004), ModelRunnerOutput(step_id=4))
    bench.now = 90
    bench.records.committed(5, 75, None, ModelRunnerOutput(step_id=5, shares_cores=True))
    assert bench.events() == [
        (4, "commit", 60, 70, {"predicted_ms": 2.0, "measured_ms": 3.0}),
        (5, "commit", 75, 90, None),
    ]
    stats = bench.records.take_stats()
    assert list(stats.step_time_ratios) == pytest.approx([1.5002])
    assert (stats.step_id, stats.shares_cores) == (5, True)
    bench.records.committed(6, 95, None, ModelRunnerOutput(step_id=6))
    assert not bench.records.take_stats().shares_cores


def test_work_counts_as_hidden_while_a_step_runs(bench: Bench) -> None:
    bench.now = 20
    assert bench.records.worked(0, "plan", 16, {"a": 1.0}) == 20
    bench.submit(0, 1, 20)
    bench.now = 40
    bench.records.worked(0, "mask", 28)
    assert bench.records.take_stats().hidden_share == 12 / 16
    assert (0, "plan", 16, 20, {"a": 1.0}) in bench.events()


def test_statistics_are_the_state_and_what_has_happened_since_the_last_call(bench: Bench) -> None:
    assert bench.records.take_stats().step_id == -1
    bench.submit(0, 7, 10)
    bench.submit(1, 8, 10)
    bench.records.committed(0, 10, (1.0, 2.0), ModelRunnerOutput(step_id=0))
    bench.scheduler.stats.num_sampled_tokens = 6
    stats = bench.records.take_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens, stats.num_running_tokens) == (1, 2, 3, 4)
    assert (stats.kv_cache_usage, stats.transfers) == (0.25, TransferCounts(num_failed=5))
    assert (stats.step_tokens, stats.step_time_ratios) == ((7, 8), (2.0,))
    assert stats.counts == StepCounts(num_sampled_tokens=6)
    bench.scheduler.stats.num_sampled_tokens = 10
    stats = bench.records.take_stats()
    assert (stats.step_tokens, stats.step_time_ratios, stats.step_gaps) == ((), (), ())
    assert stats.counts == StepCounts(num_sampled_tokens=4)
    for step_id in range(MAX_GAPS + 1):
        bench.submit(step_id, step_id, 10)
    assert bench.records.take_stats().step_tokens == tuple(range(1, MAX_GAPS + 1)), "the newest ones"
