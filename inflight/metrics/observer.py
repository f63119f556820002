"""`EngineObserver`: what `AsyncLLM` reports while it serves; Prometheus metrics and traces are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from inflight.interface.statistics import SchedulerStats
from inflight.outputs import RequestMetrics
from inflight.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """One request that has ended, however it did.

    `finish_reasons` has one entry per completion: "stop", "length", "abort" or "error". `metrics` is None if it ended before
    its first token. `trace_headers` are the W3C headers (traceparent, tracestate) that came with it, in lower case.
    """

    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    finish_reasons: tuple[str, ...]
    arrival_time: float
    finished_time: float
    metrics: RequestMetrics | None
    trace_headers: Mapping[str, str]


class EngineObserver(Protocol):
    """Called on the front end's event loop, in order; must return at once and must not raise."""

    def stats_changed(self, stats: SchedulerStats) -> None:
        """After a step, at most every 50 ms or so; the counts in between are added up."""

    def first_token(self, seconds: float) -> None:
        """A request's first token is there, so many seconds after its arrival."""

    def tokens_generated(self, count: int, seconds: float) -> None:
        """`count` further tokens of one completion came `seconds` after the one before them."""

    def request_finished(self, request: FinishedRequest) -> None:
        """The last completion of a request has ended."""
