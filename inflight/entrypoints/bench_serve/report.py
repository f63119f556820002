"""A load's figures under the names of vLLM's `bench serve`, and the table that is printed of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight.entrypoints.bench_serve.load import Load
from inflight.entrypoints.bench_serve.record import RequestRecord
from inflight.errors import ConfigError

LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOALS = ("ttft", "tpot", "e2el")

# per request, and much of it: saved on demand
DETAILS = (
    *("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times", "lags"),
    *("generated_texts", "errors"),
)


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """`goodput`: the most milliseconds of each latency that a good request may take."""

    latencies: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    goodput: Mapping[str, float] | None = None

    @classmethod
    def parse(cls, latencies: str, percentiles: str, goodput: Sequence[str]) -> ReportSettings:
        """ "ttft,itl", "50,99.9" and ("ttft:200", "tpot:50").

        Raises:
            ConfigError: a name or a number is none.
        """
        names = tuple(name.strip() for name in latencies.split(",") if name.strip())
        if unknown := [name for name in names if name not in LATENCIES]:
            raise ConfigError(f"--percentile-metrics: unknown {', '.join(unknown)}; known are {', '.join(LATENCIES)}")
        values = tuple(_number("--metric-percentiles", text) for text in percentiles.split(",") if text.strip())
        if any(not 0 <= value <= 100 for value in values):
            raise ConfigError(f"--metric-percentiles {percentiles}: each must be from 0 to 100")
        goals = {}
        for goal in (part for text in goodput for part in text.split()):
            name, _, text = goal.partition(":")
            if name not in GOALS:
                raise ConfigError(f"--goodput {goal}: give {', '.join(GOALS)}, each with milliseconds, as in ttft:200")
            goals[name] = _number("--goodput", text)
        return cls(latencies=names, percentiles=values, goodput=goals or None)


def figures(load: Load, settings: ReportSettings, *, max_concurrency: int | None = None) -> dict[str, Any]:  # Any: JSON
    """Throughputs are per second of the whole load; latencies in milliseconds of the requests that succeeded."""
    good = [record for record in load.records if record.success]
    num_input = sum(record.num_prompt_tokens for record in good)
    num_output = sum(record.num_output_tokens for record in good)
    seconds = max(load.seconds, 1e-9)
    goals = settings.goodput
    result: dict[str, Any] = {
        "duration": load.seconds,
        "completed": len(good),
        "failed": len(load.records) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": None if goals is None else sum(_is_good(record, goals) for record in good) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(good),
    }
    result |= _details(load.records)
    values = {
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.tpot is not None],
        "itl": [itl for record in good for itl in record.itls],
        "e2el": [record.latency for record in good],
    }
    for name in settings.latencies:
        result |= _spread(name, values[name], settings.percentiles)
    if max_concurrency is not None:
        result |= _spread("client_queue_time", [record.queue_time for record in good], settings.percentiles)
    lags = [record.lag for record in load.records]
    result |= _spread("client_lag", lags, (50.0, 99.0)) | {"max_client_lag_ms": max(lags, default=0.0) * 1e3}
    return result | {"client_cpu_share": load.cpu_seconds / seconds}


def table(result: Mapping[str, Any], settings: ReportSettings) -> Iterator[str]:  # Any: JSON
    """As lines, in vLLM's layout."""
    yield _title(" Serving Benchmark Result ", "=")
    yield _row("Successful requests:", result["completed"])
    yield _row("Failed requests:", result["failed"])
    yield _row("Benchmark duration (s):", result["duration"])
    yield _row("Total input tokens:", result["total_input_tokens"])
    yield _row("Total generated tokens:", result["total_output_tokens"])
    yield _row("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _row("Request goodput (req/s):", result["request_goodput"])
    yield _row("Output token throughput (tok/s):", result["output_throughput"])
    yield _row("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _row("Total token throughput (tok/s):", result["total_token_throughput"])
    yield _row("Peak concurrent requests:", result["max_concurrent_requests"])
    for name in settings.latencies:
        short, long = LATENCIES[name]
        yield from _spread_rows(result, name, short, long, settings.percentiles)
    if "mean_client_queue_time_ms" in result:
        yield from _spread_rows(
            result, "client_queue_time", "Client Queue", "Held back by --max-concurrency", settings.percentiles
        )
    yield _title("The client itself")
    yield _row("P99 late to send (ms):", result["p99_client_lag_ms"])
    yield _row("Latest to send (ms):", result["max_client_lag_ms"])
    yield _row("Share of a core used:", result["client_cpu_share"])
    yield "=" * 50
    for error, count in Counter(filter(None, result["errors"])).most_common(5):
        yield f"{count} failed: {error}"


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:  # Any: JSON
    start = min((record.sent for record in records), default=0.0)
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens if record.success else 0 for record in records],
        "start_times": [record.sent - start for record in records],
        "ttfts": [record.ttft if record.success else 0.0 for record in records],
        "itls": [record.itls for record in records],
        "latencies": [record.latency for record in records],
        "queue_times": [record.queue_time for record in records],
        "lags": [record.lag for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds or [0.0]) * 1e3
    result = {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
    }
    return result | {f"p{each:g}_{name}_ms": float(np.percentile(values, each)) for each in percentiles}


def _spread_rows(
    result: Mapping[str, Any], name: str, short: str, long: str, percentiles: Sequence[float]
) -> Iterator[str]:
    yield _title(long)
    yield _row(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
    yield _row(f"Median {short} (ms):", result[f"median_{name}_ms"])
    for each in percentiles:
        yield _row(f"P{each:g} {short} (ms):", result[f"p{each:g}_{name}_ms"])


def _is_good(record: RequestRecord, goals: Mapping[str, float]) -> bool:
    """A request of one token has no time per token, and cannot miss that goal."""
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[name] * 1e3 <= goal for name, goal in goals.items())


def _peak_tokens(records: Sequence[RequestRecord]) -> float:
    """Output tokens in the best of the seconds since the first request; a request's tokens are shared out over its pieces."""
    tokens: defaultdict[int, float] = defaultdict(float)
    start = min((record.sent for record in records), default=0.0)
    for record in records:
        for moment in record.token_times:
            tokens[math.floor(moment - start)] += record.num_output_tokens / len(record.token_times)
    return max(tokens.values(), default=0.0)


def _peak_requests(records: Sequence[RequestRecord]) -> int:
    """How many were under way at once: of [sent, ended), so an end comes before a start at the same time."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def _title(text: str, fill: str = "-") -> str:
    return f"{text:{fill}^50}"


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{option}: {text!r} is not a number")
    return value
