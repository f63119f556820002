"""`INSTRUMENTS`: every metric of the server, declared once: name, kind, help, labels, buckets, and whether vLLM has it, too."""

from dataclasses import dataclass
from typing import Literal

PREFIX = "inflight:"

FINISHED_REASONS = ("stop", "length", "abort", "error")

# Seconds. Bounds that people set as goals (0.1 s, 0.2 s, ...) are among them.
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


# Metrics that have several names in vLLM: the name that vLLM and Inflight share -> vLLM's other names.
_MORE_VLLM_NAMES = {"inter_token_latency_seconds": ("time_per_output_token_seconds",)}


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric, labelled with `model_name` and `labels`. If `data_parallel_size` is above 1, the metrics of `OF_ENGINE` have
    the label `engine`, too, the number of the replica.

    `name` does not contain the prefix. The name of a counter does not contain the `_total` that its samples have.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, without infinity
    in_vllm: bool = False

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """The full names, such as `vllm:num_requests_running`, under which the same samples are exposed again."""
        names = (self.name, *_MORE_VLLM_NAMES.get(self.name, ())) if self.in_vllm else ()
        return tuple(f"vllm:{name}" for name in names)


def _counter(name: str, help: str, *labels: str, in_vllm: bool = False) -> Instrument:
    return Instrument(name, "counter", help, labels, in_vllm=in_vllm)


def _gauge(name: str, help: str, *labels: str, in_vllm: bool = False) -> Instrument:
    return Instrument(name, "gauge", help, labels, in_vllm=in_vllm)


def _histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str, in_vllm: bool = False) -> Instrument:
    return Instrument(name, "histogram", help, labels, buckets, in_vllm)


# the metrics that come from an engine's reports
_ENGINE_INSTRUMENTS = (
    # engine
    _gauge("engine_up", "1 while the engine works, 0 once it has failed or its process has ended."),
    _gauge(
        "num_requests_running", "Completions in the batch now. A preempted one waits, and is not counted.", in_vllm=True
    ),
    _gauge(
        "num_requests_waiting", "Requests that wait for their first step, for blocks or for a grammar.", in_vllm=True
    ),
    _gauge(
        "num_waiting_tokens", "Tokens of the waiting requests: their prompts, and what preempted requests have emitted."
    ),
    _counter("engine_steps", "Steps committed by the engine."),
    _histogram(
        "iteration_tokens_total", "Tokens of a step: of prompts, of decodes, and drafts.", TOKEN_BUCKETS, in_vllm=True
    ),
    _histogram("step_gap_seconds", "Time for which the devices were idle between two steps.", STEP_GAP_BUCKETS),
    _histogram(
        "step_time_ratio",
        "Measured time of a step divided by the time that was predicted for it.",
        (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0),
    ),
    _gauge(
        "hidden_share",
        "Share of the engine's CPU work since its last report that was done while a device computed a step; NaN before the "
        "first step.",
    ),
    _gauge(
        "cores_shared",
        "1 if compute threads had to wait for their cores in the last steps, because of other programs or a quota, else 0.",
    ),
    _counter(
        "num_preemptions",
        "How often a running request had to give its KV blocks to others, and to wait again.",
        in_vllm=True,
    ),
    # KV cache
    _gauge("kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1.", in_vllm=True),
    _counter("prefix_cache_queries", "Tokens of admitted requests, counted at each admission.", in_vllm=True),
    _counter(
        "prefix_cache_hits",
        "How many of these tokens were in the prefix cache, or in blocks of another completion of the same request.",
        in_vllm=True,
    ),
    _counter(
        "external_prefix_cache_queries",
        "Tokens of waiting requests that the KV cache did not have, looked for in host memory and tiers.",
        in_vllm=True,
    ),
    _counter("external_prefix_cache_hits", "How many of these tokens were loaded into the KV cache.", in_vllm=True),
    _counter("kv_offload_load_bytes", "Bytes of KV blocks loaded from host memory."),
    _counter("kv_offload_store_bytes", "Bytes of KV blocks saved to host memory."),
    _counter("kv_offload_load_time", "Seconds that these loads took, from request to end, added up."),
    _counter("kv_offload_store_time", "Seconds that these saves took, from request to end, added up."),
    _counter("kv_offload_skipped_blocks", "KV blocks that were not saved, because too many were being saved."),
    _counter("kv_offload_failures", "Loads and saves that have failed."),
    _counter("kv_offload_late_requests", "Requests that did not wait for the end of their load, and computed."),
    _counter("kv_tier", "What a tier has done or refused, in operations, bytes or seconds.", "tier", "what"),
    _gauge(
        "cache_config_info",
        "Always 1. The labels are the tokens of a KV block and the number of blocks, also on a CPU.",
        *("block_size", "num_gpu_blocks"),
        in_vllm=True,
    ),
    # experts of several replicas
    _gauge(
        "expert_balance",
        "Mean work of a rank in layers with experts, divided by the work of the busiest rank of each step; 1 is best, and 0 "
        "means that it is not known.",
    ),
    _counter("expert_rebalances", "How often busy experts got other copies, or did not get them in time.", "result"),
    _counter("expert_copies", "Copies of experts that were brought to other ranks and used, of all layers."),
    # images
    _counter(
        "encoder_cache_queries",
        "Images of requests that got a slot, without those that the prefix cache made unnecessary. A tile counts as an image.",
    ),
    _counter("encoder_cache_misses", "How many of these images the vision tower had to encode."),
    _counter("encoder_slices", "Parts of layers of the vision tower that steps have computed."),
    _counter("encoder_seconds", "Seconds that steps took longer because of these slices, about, added up."),
    _gauge("encoder_cache_usage_perc", "Share of the cache of embeddings of images in use, from 0 to 1."),
    # speculative decoding
    _counter("spec_decode_num_drafts", "How often a step has verified drafts of a request.", in_vllm=True),
    _counter("spec_decode_num_draft_tokens", "Drafts that were verified.", in_vllm=True),
    _counter("spec_decode_num_accepted_tokens", "How many of these drafts were accepted.", in_vllm=True),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "How often the draft at this position of a row was accepted, counted from 0.",
        "position",
        in_vllm=True,
    ),
)
OF_ENGINE = frozenset(each.name for each in _ENGINE_INSTRUMENTS)

INSTRUMENTS = (
    *_ENGINE_INSTRUMENTS,
    # faults
    _gauge("engine_recovering", "1 while the engine recovers from a fault, else 0."),
    _counter("recoveries", "Recoveries from faults, by cause.", "cause"),
    _gauge("last_recovery_seconds", "Time from the notice of the last fault to the end of its recovery."),
    _counter("resumed_requests", "Sequences that went on after a recovery."),
    _counter("stale_frames", "Late messages from before a recovery that were dropped."),
    # traffic
    _counter("prompt_tokens", "Prompt tokens of requests that have ended.", in_vllm=True),
    _counter("generation_tokens", "Tokens generated, counted when they are generated.", in_vllm=True),
    _counter(
        "request_success",
        "Completions that have ended, by reason; a request with n=4 counts four.",
        "finished_reason",
        in_vllm=True,
    ),
    _counter("requests_refused", "Requests refused before they started, by reason.", "reason"),
    _histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS, in_vllm=True),
    _histogram(
        "request_generation_tokens",
        "Tokens generated for a request, all its completions together.",
        TOKEN_BUCKETS,
        in_vllm=True,
    ),
    _histogram("request_params_max_tokens", "The max_tokens that a request asked for.", TOKEN_BUCKETS, in_vllm=True),
    _histogram(
        "request_params_n", "How many completions a request asked for.", (1.0, 2.0, 5.0, 10.0, 20.0), in_vllm=True
    ),
    # latency: a request that ended before its first token is not counted
    _histogram("time_to_first_token_seconds", "From arrival to the first token.", LATENCY_BUCKETS, in_vllm=True),
    _histogram(
        "inter_token_latency_seconds",
        "Time between two tokens of a completion. If several come together, the time is divided evenly among them.",
        TOKEN_LATENCY_BUCKETS,
        in_vllm=True,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Mean time between two tokens of a completion, one value for each request.",
        TOKEN_LATENCY_BUCKETS,
        in_vllm=True,
    ),
    _histogram("e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS, in_vllm=True),
    _histogram("request_queue_time_seconds", "From arrival to the first step.", LATENCY_BUCKETS, in_vllm=True),
    _histogram(
        "request_prefill_time_seconds", "From the first step to the first token.", LATENCY_BUCKETS, in_vllm=True
    ),
    _histogram("request_decode_time_seconds", "From the first token to the last.", LATENCY_BUCKETS, in_vllm=True),
    _histogram(
        "request_inference_time_seconds", "From the first step to the last token.", LATENCY_BUCKETS, in_vllm=True
    ),
    # images
    _counter(
        "mm_cache_queries", "Images of requests that were looked for in the cache of processed images.", in_vllm=True
    ),
    _counter(
        "mm_cache_hits",
        "How many of these images were in the cache, or were being processed for another request.",
        in_vllm=True,
    ),
    _counter("images_processed", "Images that were decoded and processed."),
    _counter("image_processing_seconds", "Seconds that this took, without the time in a queue, added up."),
    _counter("images_refused", "Images that were not used, by reason.", "reason"),
    # HTTP
    _counter("http_requests", "HTTP requests answered.", "route", "status"),
    _histogram(
        "http_request_duration_seconds",
        "From an HTTP request to the last byte of its answer.",
        LATENCY_BUCKETS,
        "route",
    ),
)
