"""`INSTRUMENTS`: every metric of the server, declared once: name, kind, labels, buckets, and vLLM's names for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "inflight:"

FINISHED_REASONS = ("stop", "length", "abort", "error")

# Seconds. A bucket is chosen so that a bound that people set as a goal is one of them.
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
TOKEN_LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
STEP_GAP_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0)
TOKEN_BUCKETS = tuple(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric, labelled with `model_name` and `labels`.

    `name` is without the prefix and, for a counter, without the `_total` that its samples carry. `aliases` are whole names
    under which the same samples are exposed again.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, without infinity
    aliases: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _counter(name: str, help: str, *labels: str, aliases: tuple[str, ...] = ()) -> Instrument:
    return Instrument(name, "counter", help, labels, aliases=aliases)


def _gauge(name: str, help: str, *, aliases: tuple[str, ...] = ()) -> Instrument:
    return Instrument(name, "gauge", help, aliases=aliases)


def _histogram(
    name: str, help: str, buckets: tuple[float, ...], *labels: str, aliases: tuple[str, ...] = ()
) -> Instrument:
    return Instrument(name, "histogram", help, labels, buckets, aliases)


INSTRUMENTS = (
    # engine
    _gauge("engine_up", "1 while the engine process makes steps or could, 0 once it is gone."),
    _gauge(
        "num_requests_running",
        "Requests that have been in a step and have not ended.",
        aliases=("vllm:num_requests_running",),
    ),
    _gauge(
        "num_requests_waiting",
        "Requests that wait for their first step, for blocks or for a grammar.",
        aliases=("vllm:num_requests_waiting",),
    ),
    _gauge("num_waiting_tokens", "Prompt tokens of the waiting requests, still to be computed."),
    _counter("engine_steps", "Steps committed by the engine."),
    _histogram("step_gap_seconds", "Time for which the devices stood still between two steps.", STEP_GAP_BUCKETS),
    _gauge("hidden_share", "Share of the host's work of late that was done while a step ran; NaN before the first."),
    _counter(
        "num_preemptions", "Requests that lost their blocks to others for a while.", aliases=("vllm:num_preemptions",)
    ),
    # KV cache
    _gauge("kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1.", aliases=("vllm:kv_cache_usage_perc",)),
    _counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", aliases=("vllm:prefix_cache_queries",)
    ),
    _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", aliases=("vllm:prefix_cache_hits",)),
    # traffic
    _counter("prompt_tokens", "Prompt tokens of requests that have ended.", aliases=("vllm:prompt_tokens",)),
    _counter("generation_tokens", "Tokens generated, as they come.", aliases=("vllm:generation_tokens",)),
    _counter(
        "request_success",
        "Completions that have ended, by reason; a request with n=4 counts four.",
        "finished_reason",
        aliases=("vllm:request_success",),
    ),
    _counter("requests_refused", "Requests turned away before they started, by reason.", "reason"),
    _histogram(
        "request_prompt_tokens",
        "Prompt tokens of a request.",
        TOKEN_BUCKETS,
        aliases=("vllm:request_prompt_tokens",),
    ),
    _histogram(
        "request_generation_tokens",
        "Tokens generated for a request, all its completions together.",
        TOKEN_BUCKETS,
        aliases=("vllm:request_generation_tokens",),
    ),
    _histogram(
        "request_params_max_tokens",
        "The max_tokens that a request asked for.",
        TOKEN_BUCKETS,
        aliases=("vllm:request_params_max_tokens",),
    ),
    _histogram(
        "request_params_n",
        "How many completions a request asked for.",
        (1.0, 2.0, 5.0, 10.0, 20.0),
        aliases=("vllm:request_params_n",),
    ),
    # latency; of requests that had a first token
    _histogram(
        "time_to_first_token_seconds",
        "From arrival to the first token.",
        LATENCY_BUCKETS,
        aliases=("vllm:time_to_first_token_seconds",),
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Between two tokens of a completion; tokens that come together share their time.",
        TOKEN_LATENCY_BUCKETS,
        aliases=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Of a request, the mean time between two tokens of a completion.",
        TOKEN_LATENCY_BUCKETS,
        aliases=("vllm:request_time_per_output_token_seconds",),
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "From arrival to the last token.",
        LATENCY_BUCKETS,
        aliases=("vllm:e2e_request_latency_seconds",),
    ),
    _histogram(
        "request_queue_time_seconds",
        "From arrival to the first step.",
        LATENCY_BUCKETS,
        aliases=("vllm:request_queue_time_seconds",),
    ),
    _histogram(
        "request_prefill_time_seconds",
        "From the first step to the first token.",
        LATENCY_BUCKETS,
        aliases=("vllm:request_prefill_time_seconds",),
    ),
    _histogram(
        "request_decode_time_seconds",
        "From the first token to the last.",
        LATENCY_BUCKETS,
        aliases=("vllm:request_decode_time_seconds",),
    ),
    _histogram(
        "request_inference_time_seconds",
        "From the first step to the last token.",
        LATENCY_BUCKETS,
        aliases=("vllm:request_inference_time_seconds",),
    ),
    # HTTP
    _counter("http_requests", "HTTP requests answered.", "route", "status"),
    _histogram("http_request_duration_seconds", "From an HTTP request to its last byte.", LATENCY_BUCKETS, "route"),
)
