"""`RequestTracing`: the observer that sends one OpenTelemetry span per request over OTLP/HTTP.

It needs the extra "tracing". A span has the attributes of the GenAI semantic conventions
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/), and the latencies that vLLM's spans have, in seconds.
Prompts, texts and stop strings are never sent.
"""

import time
from typing import TYPE_CHECKING

from inflight.errors import ConfigError
from inflight.metrics.observer import EngineObserver, FinishedRequest
from inflight.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

OPERATION = "text_completion"  # for chats, too, because the engine sees only tokens


class RequestTracing(EngineObserver):
    """Each front end has one `RequestTracing`, and uses it on its event loop. A thread sends the spans in batches.

    If a request has the header `traceparent`, this header names the parent of the request's span. Otherwise the span is a trace
    of its own. The OTEL_TRACES_SAMPLER variables decide which spans are sent. By default these are the spans whose parent is
    sampled, and those without a parent.
    """

    def __init__(self, model_name: str, endpoint: str, *, exporter: "SpanExporter | None" = None) -> None:
        """`endpoint` is the URL that spans are posted to, such as http://localhost:4318/v1/traces. If `exporter` is given, it
        gets the spans instead.

        Raises:
            ConfigError: the extra is not installed, or `endpoint` is not an http or https URL.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"the traces endpoint {endpoint!r} is not a URL such as http://localhost:4318/v1/traces")
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError('traces need OpenTelemetry: pip install "inflight-llm[tracing]"') from error
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "inflight"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("inflight")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._model_name = model_name

    def request_finished(self, request: FinishedRequest) -> None:
        to_wall_clock = time.time() - time.monotonic()
        span = self._tracer.start_span(
            f"{OPERATION} {self._model_name}",
            context=self._propagator.extract(request.trace_headers),
            kind=self._kind,
            attributes=_attributes(request, self._model_name),
            start_time=int((request.arrival_time + to_wall_clock) * 1e9),
        )
        if "error" in request.finish_reasons:
            span.set_attribute("error.type", "engine_error")
            span.set_status(self._error)
        span.end(int((request.finished_time + to_wall_clock) * 1e9))

    def close(self) -> None:
        """Send the spans that are left. Do not call this on the event loop: it blocks for up to the exporter's timeout."""
        self._provider.shutdown()


def _attributes(request: FinishedRequest, model_name: str) -> "dict[str, AttributeValue]":
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": OPERATION if request.makes_text else "embeddings",
        "gen_ai.provider.name": "inflight",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": request.request_id,
        "gen_ai.response.finish_reasons": request.finish_reasons,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.latency.e2e": request.finished_time - request.arrival_time,
    }
    if request.makes_text:
        attributes |= _of_sampling(request.params)
    times = request.metrics
    if times is not None:
        attributes["gen_ai.latency.time_in_queue"] = times.first_scheduled_time - times.arrival_time
    if times is not None and times.first_token_time is not None and times.time_to_first_token is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = times.time_to_first_token
        attributes["gen_ai.latency.time_to_first_token"] = times.time_to_first_token
        attributes["gen_ai.latency.time_in_model_prefill"] = times.first_token_time - times.first_scheduled_time
        attributes["gen_ai.latency.time_in_model_decode"] = times.finished_time - times.first_token_time
    return attributes


def _of_sampling(params: SamplingParams) -> "dict[str, AttributeValue]":
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    return attributes
