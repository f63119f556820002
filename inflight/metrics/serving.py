"""`ServingMetrics`: the observer that Prometheus scrapes."""

from __future__ import annotations

import math

from inflight.interface.statistics import SchedulerStats
from inflight.metrics.exposition import Exposition, PendingHistogram
from inflight.metrics.instruments import FINISHED_REASONS, INSTRUMENTS
from inflight.metrics.observer import EngineObserver, FinishedRequest


class ServingMetrics(EngineObserver):
    """One per front end, on its event loop. `instruments.py` says what each metric means.

    Every front end hears of every step: only the one with `records_engine` counts them. What is called for every token is
    counted in plain numbers, which go over to prometheus_client's at the next step, end of a request, or scrape.
    """

    def __init__(self, model_name: str, *, records_engine: bool = True) -> None:
        metrics = Exposition(INSTRUMENTS, model_name)
        self._metrics = metrics
        self._records_engine = records_engine
        self._last_step_id: int | None = None
        self._running = metrics.gauge("num_requests_running")
        self._waiting = metrics.gauge("num_requests_waiting")
        self._waiting_tokens = metrics.gauge("num_waiting_tokens")
        self._cache_usage = metrics.gauge("kv_cache_usage_perc")
        self._hidden_share = metrics.gauge("hidden_share")
        self._up = metrics.gauge("engine_up")
        self._steps = metrics.counter("engine_steps")
        self._step_gap = metrics.histogram("step_gap_seconds")
        self._preemptions = metrics.counter("num_preemptions")
        self._cache_queries = metrics.counter("prefix_cache_queries")
        self._cache_hits = metrics.counter("prefix_cache_hits")
        self._prompt_tokens = metrics.counter("prompt_tokens")
        self._generation_tokens = metrics.counter("generation_tokens")
        self._ended = {reason: metrics.counter("request_success", reason) for reason in FINISHED_REASONS}
        self._first_token = metrics.histogram("time_to_first_token_seconds")
        self._inter_token = PendingHistogram(metrics.histogram("inter_token_latency_seconds"))
        self._num_pending_tokens = 0
        if records_engine:
            self._up.set(1)
            self._hidden_share.set(math.nan)

    def stats_changed(self, stats: SchedulerStats) -> None:
        self._flush()
        if not self._records_engine:
            return
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_tokens.set(stats.num_waiting_tokens)
        self._cache_usage.set(stats.kv_cache_usage)
        self._cache_queries.inc(stats.prefix_cache_queries)
        self._cache_hits.inc(stats.prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions)
        if self._last_step_id is not None:
            self._steps.inc(max(0, stats.step_id - self._last_step_id))
        self._last_step_id = stats.step_id
        for gap in stats.step_gaps:
            self._step_gap.observe_many(gap, 1)
        if stats.hidden_share is not None:
            self._hidden_share.set(stats.hidden_share)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe_many(seconds, 1)
        self._num_pending_tokens += 1

    def tokens_generated(self, count: int, seconds: float | None) -> None:
        if seconds is not None:
            self._inter_token.observe_many(seconds / count, count)
        self._num_pending_tokens += count

    def request_finished(self, request: FinishedRequest) -> None:
        self._flush()
        self._prompt_tokens.inc(request.num_prompt_tokens)
        for reason in request.finish_reasons:
            self._ended[reason].inc()
        self._observe("request_prompt_tokens", request.num_prompt_tokens)
        self._observe("request_generation_tokens", request.num_generation_tokens)
        self._observe("request_params_n", request.params.n)
        if request.params.max_tokens is not None:
            self._observe("request_params_max_tokens", request.params.max_tokens)
        times = request.metrics
        if times is None:
            return
        decode_seconds = times.finished_time - times.first_token_time
        self._observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        self._observe("request_queue_time_seconds", times.first_scheduled_time - times.arrival_time)
        self._observe("request_prefill_time_seconds", times.first_token_time - times.first_scheduled_time)
        self._observe("request_decode_time_seconds", decode_seconds)
        self._observe("request_inference_time_seconds", times.finished_time - times.first_scheduled_time)
        num_further = request.num_generation_tokens / len(request.finish_reasons) - 1  # of one completion, on average
        if num_further > 0:
            self._observe("request_time_per_output_token_seconds", decode_seconds / num_further)

    def engine_died(self) -> None:
        """From now on `engine_up` is 0."""
        if self._records_engine:
            self._up.set(0)
            self._running.set(0)
            self._waiting.set(0)

    def http_request(self, route: str, status: int, seconds: float) -> None:
        """An answer's last byte is sent. `route` is the route's pattern, not the path that was asked for."""
        self._metrics.counter("http_requests", route, str(status)).inc()
        self._metrics.histogram("http_request_duration_seconds", route).observe_many(seconds, 1)

    def request_refused(self, reason: str) -> None:
        """A request was turned away before it started: "queue_full", "draining", ..."""
        self._metrics.counter("requests_refused", reason).inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """Body and content type of an answer to a scrape with this `Accept` header. Of all front ends, whichever is asked."""
        self._flush()
        return self._metrics.render(accept)

    def _observe(self, name: str, value: float) -> None:
        self._metrics.histogram(name).observe_many(value, 1)

    def _flush(self) -> None:
        if self._num_pending_tokens:
            self._generation_tokens.inc(self._num_pending_tokens)
            self._num_pending_tokens = 0
            self._inter_token.flush()
