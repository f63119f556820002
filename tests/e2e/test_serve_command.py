"""`inflight serve` with the embedded model on a bad day: signals with streams running, an engine that is killed, TLS, keys."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.entrypoints.http.app import build_app
from inflight.entrypoints.serve.asgi import PROBES
from inflight.entrypoints.serve.middlewares import wrap
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.metrics.serving import ServingMetrics
from tests.e2e.serve_process import MODEL, assert_nothing_left, events_of, serving, shared_memory_of, tree_of
from tests.support.certificates import make_certificate, needs_openssl
from tests.support.waits import wait_until
from tests.unit.engine.serving.serving import mock_engine

KEY = "a-key-of-the-test"
COMPLETION = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
NUM_STREAMS, NUM_TOKENS = 20, 300


def test_sigterm_lets_twenty_streams_end_and_leaves_nothing() -> None:
    with serving() as server:
        streams = [server.start_stream(NUM_TOKENS) for _ in range(NUM_STREAMS)]
        pids = tree_of(server.popen.pid)
        shared = shared_memory_of(pids)
        assert len(pids) == 2
        phases = r"listening [\d.]+, importing [\d.]+, engine [\d.]+, app [\d.]+"
        assert re.search(
            rf"ready: http://\S+ serves {MODEL}, .*, after [\d.]+ s: {phases}$", server.text_of_log(), re.MULTILINE
        )
        server.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: there is no file" in server.text_of_log())
        lasting = server.start_stream(2000)  # without it the others might have ended before the next looks
        server.popen.send_signal(signal.SIGTERM)
        assert "server_draining" in server.wait_until("/ready", 503)
        status, refusal = server.request("POST", "/v1/completions", COMPLETION)
        assert status == 503
        assert "server_draining" in refusal
        lasting.connection.close()
        for stream in streams:
            events = events_of(stream.rest())
            assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
            assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        assert server.end() == 0, server.text_of_log()
        assert_nothing_left(pids, shared)


def test_a_second_sigterm_stops_at_once() -> None:
    with serving() as server:
        streams = [server.start_stream(2000) for _ in range(NUM_STREAMS)]
        pids = tree_of(server.popen.pid)
        server.popen.send_signal(signal.SIGTERM)
        server.wait_until("/ready", 503)
        start = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM, server.text_of_log()
        assert time.monotonic() - start < 60
        assert not any("[DONE]" in stream.rest() for stream in streams)
        assert_nothing_left(pids, set())


def test_sigterm_while_starting_leaves_nothing() -> None:
    with serving(ready=False) as server:
        assert server.wait_until("/live", 200) == '{"status": "live"}'
        server.wait_for_child("engine")
        pids = tree_of(server.popen.pid)
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.text_of_log()
        assert_nothing_left(pids, set())


def test_without_fault_tolerance_the_death_of_the_engine_ends_every_stream_and_the_command() -> None:
    with serving("--no-enable-fault-tolerance") as server:
        streams = [server.start_stream(2000) for _ in range(4)]
        os.kill(server.children()["engine"], signal.SIGKILL)
        for stream in streams:
            assert events_of(stream.rest())[-1]["error"]["code"] == "engine_dead"
        assert server.end() == 1
        assert "killed by SIGKILL" in server.text_of_log()


@needs_openssl
def test_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=certificate)
    options = ["--ssl-certfile", certificate, "--ssl-keyfile", key]
    with serving(*options, tls=trusting, ready=False) as server:
        assert server.wait_until("/live", 200)
        with httpx.Client(timeout=300) as plain, pytest.raises(httpx.HTTPError):
            plain.get(f"http://127.0.0.1:{server.port}/live")
        with httpx.Client(timeout=300) as wary, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            wary.get(f"https://127.0.0.1:{server.port}/live")
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_pages_and_probes_that_people_expect() -> None:
    async def check(*, disable: bool) -> None:
        async with mock_engine() as engine:
            settings = ServerSettings(disable_fastapi_docs=disable, access_log="off")
            app: Any = wrap(build_app(engine, settings, metrics=ServingMetrics(MODEL)), settings)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                for path, text in (("/docs", "openapi.json"), ("/openapi.json", "/v1/chat/completions")):
                    answer = await client.get(path)
                    assert answer.status_code == (404 if disable else 200), path
                    assert disable or text in answer.text
                for method in ("GET", "POST", "HEAD"):  # SageMaker asks by GET, others by POST
                    assert (await client.request(method, "/ping")).status_code == 200
                assert set((await client.put("/ping")).headers["allow"].split(", ")) == {"GET", "POST", "HEAD"}
                assert (await client.get("/tokenize")).headers["allow"] == "POST"

    asyncio.run(check(disable=False))
    asyncio.run(check(disable=True))


def test_no_route_but_health_is_reached_without_a_key() -> None:
    async def check() -> None:
        async with mock_engine() as engine:
            settings = ServerSettings(api_keys=(KEY,), served_model_names=(MODEL,), access_log="off")
            app: Any = build_app(engine, settings, metrics=ServingMetrics(MODEL))
            transport = httpx.ASGITransport(wrap(app, settings))
            asked = [(route.path, method) for route in app.routes for method in route.methods]
            assert {"/v1/chat/completions", "/metrics", "/openapi.json", "/reset_prefix_cache"} <= {p for p, _ in asked}
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                for path, method in asked:
                    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
                        answer = await client.request(method, path, headers=headers)
                        assert (answer.status_code == 401) == (path not in PROBES), (method, path)
                    if path == "/v1/engine/live":  # goes on until the client goes
                        continue
                    answer = await client.request(method, path, headers={"Authorization": f"Bearer {KEY}"})
                    assert answer.status_code != 401, (method, path)

    asyncio.run(check())
