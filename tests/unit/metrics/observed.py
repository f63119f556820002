"""A scripted series of observer calls, and the scraped text as a dict."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from inflight.interface.statistics import SchedulerStats, StepCounts
from inflight.metrics.observer import EngineObserver, FinishedRequest
from inflight.metrics.serving import ServingMetrics
from inflight.outputs import RequestMetrics
from inflight.sampling_params import SamplingParams

TIMES = RequestMetrics(arrival_time=100.0, first_scheduled_time=100.25, first_token_time=100.5, finished_time=102.5)


def finished(
    *reasons: str,
    params: SamplingParams | None = None,
    times: RequestMetrics | None = TIMES,
    trace_headers: Mapping[str, str] | None = None,
) -> FinishedRequest:
    """Ten prompt tokens, four of them cached; five tokens of each completion; 2.5 seconds."""
    return FinishedRequest(
        request_id="request-1",
        params=params or SamplingParams(max_tokens=64),
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_generation_tokens=5 * len(reasons),
        finish_reasons=reasons,
        arrival_time=100.0,
        finished_time=102.5,
        metrics=times,
        trace_headers=trace_headers or {},
    )


def stats(step_id: int = 7) -> SchedulerStats:
    return SchedulerStats(
        step_id=step_id,
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=900,
        kv_cache_usage=0.25,
        counts=StepCounts(num_queried_tokens=100, num_hit_tokens=40, num_preemptions=1, accepted_at=(1,)),
        step_tokens=(4, 60),
        step_gaps=(0.00015, 0.004),
        hidden_share=0.9,
    )


def observe_one_request(observer: EngineObserver) -> None:
    """Its first token after half a second, then four tokens in two steps of one second each."""
    observer.first_token(0.5)
    observer.tokens_generated(1, 1.0)
    observer.tokens_generated(3, 0.6)
    observer.request_finished(finished("stop"))


def scrape(metrics: ServingMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(sample name, its labels but model_name) -> value."""
    text = metrics.render("")[0].decode()
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
