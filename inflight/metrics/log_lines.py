"""`StatsLog` and `RequestLog`: the observers that write lines to the log, about the engine and about each request."""

import asyncio
import dataclasses
import logging

from inflight.interface.statistics import SchedulerStats, StepCounts
from inflight.metrics.observer import EngineObserver, FinishedRequest
from inflight.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

CANARY_TOKENS = 1  # prompt tokens of a canary, a request that only tests whether an idle engine makes steps


class StatsLog(EngineObserver):
    """Logs a line every `interval` seconds while there are requests, and a last one after the engine has become idle.

    Used by one event loop. Each front end gets the statistics of the whole engine, so only one of them has a `StatsLog`. If
    there are several replicas, it has one for each.

    Args:
        engine: the number of the replica; None if there is only one.
    """

    def __init__(self, interval: float, engine: int | None = None) -> None:
        self._interval = interval
        self._engine = engine
        self._begin = 0.0  # start of the current interval
        self._counts = StepCounts()  # of this interval
        self._newest: SchedulerStats | None = None  # None if the engine is idle and no interval runs

    def stats_changed(self, stats: SchedulerStats) -> None:
        if stats.engine != (self._engine or 0):
            return
        if self._newest is None:
            if not _has_requests(stats) and stats.counts.num_computed_prompt_tokens <= CANARY_TOKENS:
                return
            self._start_interval()
        self._newest = stats
        self._counts += stats.counts

    def _start_interval(self) -> None:
        self._counts = StepCounts()
        loop = asyncio.get_running_loop()
        self._begin = loop.time()
        loop.call_later(self._interval, self._end_interval)

    def _end_interval(self) -> None:
        assert self._newest is not None
        line = describe(self._newest, self._counts, asyncio.get_running_loop().time() - self._begin)
        logger.info("%s", line if self._engine is None else f"engine {self._engine}: {line}")
        if _has_requests(self._newest):
            self._start_interval()
        else:
            self._newest = None


def describe(newest: SchedulerStats, counts: StepCounts, seconds: float) -> str:
    """Returns a line about the engine: its state now, and rates from what its steps did within `seconds`."""
    num_output_tokens = counts.num_sampled_tokens + counts.num_forced_tokens
    state = f"{newest.num_running} requests run, {newest.num_waiting} wait"
    parts = [
        state if _has_requests(newest) else "the engine is idle now",
        f"{counts.num_computed_prompt_tokens / seconds:.1f} prompt tokens/s",
        f"{num_output_tokens / seconds:.1f} output tokens/s",
        f"KV cache {newest.kv_cache_usage:.1%} used",
        f"prefix cache hits {counts.num_hit_tokens / max(counts.num_queried_tokens, 1):.1%}",
    ]
    if newest.shares_cores:
        parts.append("compute threads wait for cores")
    if counts.num_draft_tokens:
        parts.append(f"drafts accepted {counts.num_accepted_tokens / counts.num_draft_tokens:.1%}")
    return ", ".join(parts)


def _has_requests(stats: SchedulerStats) -> bool:
    return bool(stats.num_running or stats.num_waiting)


class RequestLog(EngineObserver):
    """Logs a line when a request is validated and tokenised, and one when it has ended. Texts are never logged."""

    def request_started(self, route: str, request_id: str, num_prompt_tokens: int, params: SamplingParams) -> None:
        logger.info("%s began: %s, %d prompt tokens, %s", request_id, route, num_prompt_tokens, _describe(params))

    def request_finished(self, request: FinishedRequest) -> None:
        logger.info(
            "%s ended: %s, %d prompt tokens (%d from the prefix cache), %d output tokens, %.3f s",
            request.request_id,
            "+".join(request.finish_reasons),
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_generation_tokens,
            request.finished_time - request.arrival_time,
        )


def _describe(params: SamplingParams) -> str:
    """Returns the parameters that differ from their defaults. A number is shown as `top_p=0.9`, and any
    other value without its content, as `stop=...`."""
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    changed = {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    values = {name: value if isinstance(value, int | float) else "..." for name, value in changed.items()}
    shown = [f"{name}={value}" for name, value in values.items()]
    return " ".join(shown) or "default parameters"


_DEFAULTS = SamplingParams()
