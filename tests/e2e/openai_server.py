"""The OpenAI application with its middlewares and a real engine, served on a free port by a thread; for real clients."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvicorn

from inflight.config.engine_args import EngineArgs
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.entrypoints.http.app import build_app
from inflight.entrypoints.serve.asgi import ASGIApp
from inflight.entrypoints.serve.engine_start import MAX_CALL_SEQUENCES
from inflight.entrypoints.serve.middlewares import wrap
from inflight.entrypoints.serve.protocol import bounded_protocol
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.metrics.serving import ServingMetrics

MODEL = "inflight-demo"


@dataclass(frozen=True)
class RunningServer:
    url: str
    engine: AsyncLLM
    loop: asyncio.AbstractEventLoop


def wait_until_idle(server: RunningServer) -> None:
    """A client that has gone is noticed a moment later."""
    deadline = time.monotonic() + 300
    while len(server.engine._requests) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(server.engine._requests) == 0


def demo_args(**more: object) -> EngineArgs:
    return EngineArgs.from_kwargs(
        {"seed": 0, "dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 1 << 26, **more}
    )


@contextmanager
def running_server(
    args: EngineArgs | None = None, settings: ServerSettings | None = None, *, limits: QueueLimits | None = None
) -> Iterator[RunningServer]:
    ready: threading.Event = threading.Event()
    found: list[RunningServer | BaseException] = []
    stop: list[uvicorn.Server] = []

    async def serve() -> None:
        metrics = ServingMetrics(MODEL)
        engine = await AsyncLLM.from_args(
            args or demo_args(),
            limits=limits or QueueLimits(max_call_sequences=MAX_CALL_SEQUENCES),
            observers=[metrics],
        )
        # On a busy machine a stream may be silent for long. Without comments its text is the same even then.
        names = (MODEL, "another-name")
        chosen = settings or ServerSettings(served_model_names=names, access_log="off", stream_keep_alive_interval=None)
        try:
            built = cast("ASGIApp", build_app(engine, chosen, metrics=metrics))
            app = cast("Any", wrap(built, chosen, metrics.http_request))
            http = bounded_protocol(chosen)
            config = uvicorn.Config(
                app, log_level="warning", lifespan="off", timeout_keep_alive=5, http=http, ws="none"
            )
            server = uvicorn.Server(config)
            listener = socket.create_server(("127.0.0.1", 0))
            stop.append(server)
            found.append(
                RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, asyncio.get_running_loop())
            )
            ready.set()
            await server.serve(sockets=[listener])
            listener.close()
        finally:
            await engine.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            found.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait()
        if isinstance(found[0], BaseException):
            raise found[0]
        yield found[0]
    finally:
        for server in stop:
            server.should_exit = True
        thread.join()
    if isinstance(found[-1], BaseException):
        raise found[-1]
