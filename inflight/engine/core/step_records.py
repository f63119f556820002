"""`StepRecords`: the times and counts of steps that the engine core records for traces and metrics."""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

from inflight.engine.core.step_clock import MAX_GAPS, StepClock
from inflight.interface.statistics import SchedulerStats, StepCounts
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.scheduler.scheduler import Scheduler
from inflight.timeline import Timeline


class StepRecords:
    """All methods are called in the engine's thread. Times are values of `time.perf_counter_ns()`.

    Attributes:
        timeline: when the engine planned, waited, committed and filled masks, and when it was idle.
    """

    def __init__(self, scheduler: Scheduler, kv_cache: KVCacheManager) -> None:
        self.timeline = Timeline()
        self._scheduler, self._kv_cache = scheduler, kv_cache
        self._clock = StepClock()
        # measured / predicted times of the steps since the last report
        self._ratios: deque[float] = deque(maxlen=MAX_GAPS)
        self._step_tokens: deque[int] = deque(maxlen=MAX_GAPS)
        self._newest_step = -1  # the id of the step that was committed last
        self._shares_cores = False  # in this step
        self._reported = StepCounts()
        self._idle_since_ns: int | None = None  # when the last request ended; None while steps are submitted
        self.record_idleness()

    def worked(self, step_id: int, phase: str, start_ns: int, details: Mapping[str, float] | None = None) -> int:
        """Record work of the engine's thread from `start_ns` to now, as a phase of this step. Returns the present time."""
        end_ns = time.perf_counter_ns()
        self.timeline.record(step_id, phase, start_ns, end_ns, details)
        self._clock.worked(start_ns, end_ns)
        return end_ns

    def submitted(self, plan: SchedulerOutput, future: Future[ModelRunnerOutput], planned_at_ns: int) -> None:
        was_idle = self._idle_since_ns is not None
        if self._idle_since_ns is not None:
            self.timeline.record(plan.step_id, "idle", self._idle_since_ns, planned_at_ns)
            self._idle_since_ns = None
        self._step_tokens.append(plan.num_tokens)
        self._clock.submitted(future, after_idleness=was_idle)

    def committed(
        self, step_id: int, start_ns: int, last_step: tuple[float, float] | None, output: ModelRunnerOutput
    ) -> None:
        """Record the commit of a step. The commit began at `start_ns`. `last_step`: the predicted and the measured seconds of
        the step; None if nothing was predicted."""
        self._newest_step, self._shares_cores = step_id, output.shares_cores
        details = None
        if last_step is not None:
            predicted, measured = last_step
            self._ratios.append(measured / predicted)
            details = {"predicted_ms": round(predicted * 1e3, 3), "measured_ms": round(measured * 1e3, 3)}
        self.worked(step_id, "commit", start_ns, details)

    def record_idleness(self) -> None:
        """Call this after requests may have ended. While there are no requests, devices do not wait for the engine, so the time
        until the next plan does not count as idle time of the devices."""
        if self._idle_since_ns is None and not self._scheduler.has_unfinished_requests():
            self._idle_since_ns = time.perf_counter_ns()

    def take_stats(self) -> SchedulerStats:
        """Returns the present state, and the counts since the last call."""
        scheduler, before = self._scheduler, self._reported
        self._reported = now = replace(scheduler.stats)
        gaps, hidden_share = self._clock.take()
        ratios = tuple(self._ratios)
        self._ratios.clear()
        step_tokens = tuple(self._step_tokens)
        self._step_tokens.clear()
        return SchedulerStats(
            step_id=self._newest_step,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_running_tokens=scheduler.num_running_tokens,
            kv_cache_usage=self._kv_cache.usage,
            counts=now - before,
            step_tokens=step_tokens,
            step_gaps=gaps,
            step_time_ratios=ratios,
            hidden_share=hidden_share,
            shares_cores=self._shares_cores,
            transfers=scheduler.transfers.take_counts(),
            encoder=None if scheduler.encoder is None else scheduler.encoder.take_counts(),
        )
