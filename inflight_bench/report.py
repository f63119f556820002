"""Computes the figures of a benchmark under the names of vLLM's `bench serve`, and writes them as JSON and as a table."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inflight_bench.load import Load
from inflight_bench.options import LATENCIES, ResultOptions
from inflight_bench.record import RequestRecord


def figures(load: Load, options: ResultOptions, *, max_concurrency: int | None = None) -> dict[str, Any]:  # Any: JSON
    """Returns all figures. Throughputs are averages over the whole run, per second. Latencies are in ms, for the requests that
    succeeded."""
    good = [record for record in load.records if record.success]
    num_input = sum(record.num_prompt_tokens for record in good)
    num_output = sum(record.num_output_tokens for record in good)
    seconds = max(load.seconds, 1e-9)
    goals = options.goals
    result: dict[str, Any] = {
        "duration": load.seconds,
        "completed": len(good),
        "failed": len(load.records) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": None if not goals else sum(_is_good(record, goals) for record in good) / seconds,
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
    for name in options.latencies:
        result |= _spread(name, values[name], options.percentiles)
    if max_concurrency is not None:
        result |= _spread("client_queue_time", [record.queue_time for record in good], options.percentiles)
    lags = [record.lag for record in load.records]
    result |= _spread("client_lag", lags, (50.0, 99.0)) | {"max_client_lag_ms": max(lags, default=0.0) * 1e3}
    return result | {"client_cpu_share": load.cpu_seconds / seconds}


def table(result: Mapping[str, Any], options: ResultOptions) -> Iterator[str]:  # Any: JSON
    """Yields the figures as lines, in vLLM's layout."""
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
    for name in options.latencies:
        short, long = LATENCIES[name]
        yield from _spread_rows(result, name, short, long, options.percentiles)
    if "mean_client_queue_time_ms" in result:
        yield from _spread_rows(
            result, "client_queue_time", "Client Queue", "Held back by --max-concurrency", options.percentiles
        )
    yield _title("The client itself")
    yield _row("P99 delay before sending (ms):", result["p99_client_lag_ms"])
    yield _row("Max delay before sending (ms):", result["max_client_lag_ms"])
    yield _row("CPU time / duration (1 = one full core):", result["client_cpu_share"])
    yield "=" * 50
    for error, count in Counter(filter(None, result["errors"])).most_common(5):
        yield f"{count} failed: {error}"


def save(figures: Mapping[str, Any], options: ResultOptions) -> Path:  # Any: JSON
    """Write the figures as JSON. The figures of single requests are written only with `save_detailed`. Returns the path."""
    concurrency = "" if figures["max_concurrency"] is None else f"-concurrency{figures['max_concurrency']}"
    model, label = figures["model_id"].split("/")[-1], options.label or figures["backend"]
    name = f"{label}-{figures['request_rate']}qps{concurrency}-{model}-{figures['date']}.json"
    left_out = () if options.save_detailed else _details(()).keys()
    kept = {key: value for key, value in figures.items() if key not in left_out}
    options.result_dir.mkdir(parents=True, exist_ok=True)
    path = options.result_dir / (options.result_filename or name)
    path.write_text(json.dumps(options.named | kept) + "\n", encoding="utf-8")
    return path


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:  # Any: JSON
    """Lists with one entry for each request. They are saved only with --save-detailed."""
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
    """Whether the request met all goals. A request of one token has no TPOT, so it always meets a TPOT goal."""
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[name] * 1e3 <= goal for name, goal in goals.items())


def _peak_tokens(records: Sequence[RequestRecord]) -> float:
    """Returns the largest number of output tokens in one second of the run. The pieces of a request's text count equally many
    tokens."""
    tokens: defaultdict[int, float] = defaultdict(float)
    start = min((record.sent for record in records), default=0.0)
    for record in records:
        for moment in record.token_times:
            tokens[math.floor(moment - start)] += record.num_output_tokens / len(record.token_times)
    return max(tokens.values(), default=0.0)


def _peak_requests(records: Sequence[RequestRecord]) -> int:
    """Returns the largest number of requests that ran at the same time. If a request ends when another starts, the two do not
    overlap."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def _title(text: str, fill: str = "-") -> str:
    return f"{text:{fill}^50}"


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"
