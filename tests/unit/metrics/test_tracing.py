"""`RequestTracing`: one span per request, with its parent, its times and the attributes of the conventions."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from inflight.errors import ConfigError
from inflight.metrics.observer import FinishedRequest
from inflight.metrics.tracing import RequestTracing
from inflight.sampling_params import SamplingParams
from tests.unit.metrics.observed import finished

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "http://127.0.0.1:4318/v1/traces"


def spans(*requests: FinishedRequest) -> tuple[ReadableSpan, ...]:
    exporter = InMemorySpanExporter()
    tracing = RequestTracing("m", ENDPOINT, exporter=exporter)
    for request in requests:
        tracing.request_finished(request)
    tracing.close()
    return exporter.get_finished_spans()


def test_a_span_continues_the_callers_trace() -> None:
    (span,) = spans(finished("stop", trace_headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}))
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.parent.is_remote


def test_without_a_parent_it_is_a_trace_of_its_own() -> None:
    (span,) = spans(finished("stop", trace_headers={"traceparent": "nonsense"}))
    assert span.parent is None


def test_a_caller_who_does_not_sample_gets_no_span() -> None:
    assert spans(finished("stop", trace_headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})) == ()


def test_attributes_and_times() -> None:
    params = SamplingParams(n=2, temperature=0.5, top_k=20, seed=3, stop="said by nobody else", max_tokens=64)
    (span,) = spans(finished("stop", "length", params=params))
    assert span.name == "text_completion m"
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes is not None
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 20,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.response.id": "request-1",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
    }
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert "said by nobody" not in str(dict(span.attributes)), "texts of the user are never sent"
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2.5, abs=1e-3)
    assert span.start_time / 1e9 == pytest.approx(100.0 + time.time() - time.monotonic(), abs=1.0)
    assert span.resource.attributes["service.name"] == "inflight"


def test_a_failure_is_one() -> None:
    (span,) = spans(finished("error", times=None))
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert "gen_ai.latency.time_in_queue" not in span.attributes


def test_the_name_of_the_service_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    (span,) = spans(finished("stop"))
    assert span.resource.attributes["service.name"] == "mine"


def test_spans_are_posted_and_no_thread_is_left() -> None:
    paths: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    before = set(threading.enumerate())
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        tracing = RequestTracing("m", f"http://127.0.0.1:{server.server_port}/v1/traces")
        tracing.request_finished(finished("stop"))
        tracing.close()
        server.shutdown()
        thread.join()
    assert paths == ["/v1/traces"]
    assert set(threading.enumerate()) <= before


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r'pip install "inflight-llm\[tracing\]"'):
        RequestTracing("m", ENDPOINT)


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="localhost:4317"):
        RequestTracing("m", "localhost:4317")
