"""`EngineObserver`: the methods that `AsyncLLM` calls while it serves. Metrics, traces and the log implement them."""

from collections.abc import Mapping
from dataclasses import dataclass

from inflight.interface.statistics import FaultStatus, SchedulerStats
from inflight.outputs import RequestMetrics
from inflight.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """One request that has ended.

    `finish_reasons` has one entry per completion: "stop", "length", "abort" or "error". `metrics` is None if the request ended
    before its first token, or without its vector. `makes_text`: otherwise vectors were made of the prompt, and `params` say
    nothing. `trace_headers` has the request's W3C headers (traceparent, tracestate), with names in lower case.
    Times are values of `time.monotonic()`.
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
    makes_text: bool = True


class EngineObserver:
    """All methods are called on the front end's event loop, one after another. A method must return at once and must not raise.
    The methods of this base class do nothing."""

    def stats_changed(self, stats: SchedulerStats) -> None:
        """Called after a step, usually every 50 ms. The counts in `stats` are those since the previous call."""

    def faults_changed(self, status: FaultStatus) -> None:
        """A recovery has begun or ended. Also called once at the start, with the present status."""

    def engine_ended(self, engine: int) -> None:
        """This engine is gone for good, counted from 0 if there are several. If there are others, they serve on."""

    def first_token(self, seconds: float) -> None:
        """A request's first token has come, `seconds` after the request's arrival."""

    def tokens_generated(self, count: int, seconds: float | None) -> None:
        """`count` further tokens of one completion have come, `seconds` after the tokens before them. If these are the first
        tokens of a second or later completion of the request, `seconds` is None."""

    def request_finished(self, request: FinishedRequest) -> None:
        """The last completion of a request has ended."""
