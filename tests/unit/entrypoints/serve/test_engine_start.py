"""What `start` makes of the settings, as clients, scrapers and readers of the log see it. The test plays the engine's part."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from inflight.config.engine_args import EngineArgs
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.entrypoints.http import app
from inflight.entrypoints.serve.engine_start import ServedModel, start
from inflight.entrypoints.serve.server import StartUpClock
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError, EngineError
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.interface.serving import AddRequest, EngineOutputs, EngineReady
from inflight.interface.statistics import SchedulerStats
from inflight.processes.streams import BlockingStream
from tests.unit.engine.serving.event_loop import until

IDLE = SchedulerStats(step_id=0, num_running=0, num_waiting=0, num_waiting_tokens=0, kv_cache_usage=0.0)
BUSY = SchedulerStats(step_id=0, num_running=1, num_waiting=0, num_waiting_tokens=0, kv_cache_usage=0.0)
PROMPT = {"prompt": [104, 105], "max_tokens": 3}


class Served:
    """A started server whose engines are the other ends of `streams`, with a client."""

    def __init__(self, model: ServedModel, streams: list[BlockingStream], clock: StartUpClock) -> None:
        self.model, self.streams, self.clock = model, streams, clock
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(model.app), base_url="http://x")  # type: ignore[arg-type]

    def scraped(self) -> str:
        return self.model.metrics.render("")[0].decode()

    def report(self, stats: SchedulerStats, engine: int = 0) -> None:
        self.streams[engine].send(EngineOutputs(outputs=(), num_received=0, stats=stats))

    async def finish(self) -> None:
        """The engine gets a request, and answers it with a token."""
        message = await asyncio.to_thread(self.streams[0].receive, (AddRequest,))
        assert isinstance(message, AddRequest)
        name = message.sequences[0].request_id
        done = EngineCoreOutput(request_id=name, new_token_ids=(97,), finish_reason=FinishReason.LENGTH)
        self.streams[0].send(EngineOutputs(outputs=(done,), num_received=1, stats=None))


@asynccontextmanager
async def serving(settings: ServerSettings, tokens: tuple[int, ...] = (1999,), **options: Any) -> AsyncIterator[Served]:
    """`tokens`: of the KV cache of each replica."""
    arriving, streams = [EngineSockets() for _ in tokens], []
    for each, num_tokens in zip(arriving, tokens, strict=True):
        ours, theirs = socket.socketpair()
        each.put(ours)
        streams.append(BlockingStream(theirs))
        streams[-1].send(EngineReady(front_end=0, num_kv_cache_tokens=num_tokens))
    clock = StartUpClock()
    args = EngineArgs(dtype="float32", data_parallel_size=len(tokens), max_num_seqs=1)
    try:
        model = await asyncio.wait_for(start(settings, args, clock, engine_sockets=arriving, **options), 300)
        try:
            yield Served(model, streams, clock)
        finally:
            await asyncio.wait_for(model.close(), 300)
    finally:
        for stream in streams:
            stream.close()


@pytest.fixture(autouse=True)
def collections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A full collection takes long in the process of the tests, and what is frozen there must stay so."""
    found: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: found.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: found.append("freeze"))
    return found


def test_names_sizes_and_bounds(collections: list[str], caplog: pytest.LogCaptureFixture) -> None:
    settings = ServerSettings(served_model_names=("a", "b"), max_queued_requests=1, log_requests=True)

    async def test() -> None:
        async with serving(settings) as served:
            listed = (await served.client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed][:2] == ["a", "b"]
            assert served.model.description.startswith("a, max_model_len ")
            assert served.model.description.endswith(", 1999 KV tokens")
            assert 'cache_config_info{block_size="16",model_name="a",num_gpu_blocks="124"} 1.0' in served.scraped()
            body = {"model": "b", **PROMPT}
            many = await served.client.post("/v1/completions", json={**body, "prompt": [[104]] * 100, "n": 11})
            assert many.status_code == 400 and "at most 2 are allowed" in many.text
            running = [asyncio.create_task(served.client.post("/v1/completions", json=body)) for _ in range(2)]
            await until(lambda: caplog.text.count("began: /v1/completions") == 2)
            refused = await served.client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            for _ in running:
                await served.finish()
            assert [(await each).status_code for each in running] == [200, 200]
            assert 'request_success_total{finished_reason="length",model_name="a"} 2.0' in served.scraped()
            assert caplog.text.count("ended: ") == 2
            phases = served.clock.summary().split(": ")[1].split(", ")
            assert [phase.split()[0] for phase in phases] == ["engine", "app"]

    caplog.set_level("INFO", "inflight")
    asyncio.run(test())
    assert collections == ["collect", "freeze"]


def test_the_tokens_of_waiting_prompts_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(ServerSettings(max_queued_tokens=3, log_requests=True)) as served:
            running = [asyncio.create_task(served.client.post("/v1/completions", json=PROMPT)) for _ in range(2)]
            await until(lambda: caplog.text.count("began: /v1/completions") == 2)
            refused = await served.client.post("/v1/completions", json=PROMPT)
            assert refused.status_code == 503 and "at most 3 may wait" in refused.text
            for _ in running:
                await served.finish()
            assert [(await each).status_code for each in running] == [200, 200]

    caplog.set_level("INFO", "inflight")
    asyncio.run(test())


def test_each_replica_has_its_own_line_and_metrics(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(ServerSettings(log_stats_interval=0.001), (1600, 3200)) as served:
            for engine, blocks in ((0, 100), (1, 200)):
                assert f'engine="{engine}",model_name="embedded",num_gpu_blocks="{blocks}"' in served.scraped()
            served.report(BUSY, 1)
            await until(lambda: 'num_requests_running{engine="1",model_name="embedded"} 1.0' in served.scraped())
            served.report(IDLE, 1)
            await until(lambda: "the engine is idle now" in caplog.text)

    caplog.set_level("INFO", "inflight.metrics.log_lines")
    asyncio.run(test())
    assert {message[:9] for message in caplog.messages if "idle" in message} == {"engine 1:"}


@pytest.mark.parametrize("records_engine", [True, False])
@pytest.mark.parametrize("interval", [0, 0.001])
def test_one_front_end_counts_and_logs_the_engine(
    records_engine: bool, interval: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving(ServerSettings(log_stats_interval=interval), records_engine=records_engine) as served:
            served.report(BUSY)
            served.report(IDLE)
            running = asyncio.create_task(served.client.post("/v1/completions", json=PROMPT))
            await served.finish()
            assert (await running).status_code == 200, "the reports before it have been read"
            assert ('inflight:engine_up{model_name="embedded"} 1.0' in served.scraped()) is records_engine
            if records_engine and interval:
                await until(lambda: "the engine is idle now" in caplog.text)

    caplog.set_level("INFO", "inflight.metrics.log_lines")
    asyncio.run(test())
    assert bool(caplog.messages) is (records_engine and interval > 0)


def test_a_request_is_traced() -> None:
    posted: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    async def test(endpoint: str) -> None:
        async with serving(ServerSettings(served_model_names=("traced",), otlp_traces_endpoint=endpoint)) as served:
            running = asyncio.create_task(served.client.post("/v1/completions", json=PROMPT))
            await served.finish()
            assert (await running).status_code == 200

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        asyncio.run(test(f"http://127.0.0.1:{server.server_port}/v1/traces"))
        server.shutdown()
        thread.join()
    assert any(b"traced" in body for body in posted), "sent at the latest when the server ends"


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_an_error_before_the_engine_starts(option: str) -> None:
    settings: dict[str, Any] = {option: "nonsense"}
    with pytest.raises(ConfigError, match="nonsense"):
        asyncio.run(start(ServerSettings(**settings), EngineArgs(model="/no/such/model"), StartUpClock()))


def test_an_app_that_cannot_be_built_leaves_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_app(engine: Any, *_: object, **__: object) -> None:
        engines.append(engine)
        raise EngineError("no app")

    engines: list[Any] = []
    monkeypatch.setattr(app, "build_app", build_app)

    async def test() -> None:
        with pytest.raises(EngineError, match="no app"):
            async with serving(ServerSettings()):
                pass
        assert not any(each.is_connected for each in engines[0]._replicas.engines)

    asyncio.run(test())
