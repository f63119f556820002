"""`start`: starts the engine, the metrics and traces that observe it, and the app.

Importing this module takes long. So it is imported only when the server answers health checks already.
"""

import asyncio
import gc
import importlib
from collections.abc import Sequence, Set
from dataclasses import dataclass

from inflight.config.engine_args import EngineArgs
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.entrypoints.serve.asgi import ASGIApp
from inflight.entrypoints.serve.server import StartUpClock
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.metrics.log_lines import RequestLog, StatsLog
from inflight.metrics.observer import EngineObserver
from inflight.metrics.serving import ServingMetrics
from inflight.metrics.tracing import RequestTracing
from inflight.model_name import EMBEDDED
from inflight.parsers.selector import resolve_parsers

_BESIDE_SECONDS = 10.0  # for tasks that write what they have, after the engine has ended
MAX_CALL_SEQUENCES = 1024  # the most sequences (prompts times n) of one request of a client


@dataclass(frozen=True)
class ServedModel:
    """The engine and the app that a `Server` serves. `name` is the first name by which requests may ask for the model.
    `beside`: the app's tasks that do not end with a connection."""

    name: str
    engine: AsyncLLM
    app: ASGIApp
    metrics: ServingMetrics
    beside: Set[asyncio.Task[None]] = frozenset()
    tracing: RequestTracing | None = None

    @property
    def description(self) -> str:
        model = self.engine.model
        return f"{self.name}, max_model_len {model.max_model_len}, {model.num_kv_cache_tokens} KV tokens"

    async def close(self) -> None:
        await self.engine.close()
        if self.beside:
            await asyncio.wait(set(self.beside), timeout=_BESIDE_SECONDS)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


async def start(
    settings: ServerSettings,
    args: EngineArgs,
    clock: StartUpClock,
    *,
    engine_sockets: Sequence[EngineSockets] = (),
    records_engine: bool = True,
) -> ServedModel:
    """
    Args:
        engine_sockets: the sockets to each replica of an engine that another process starts. If empty, this process starts the
            engine.
        records_engine: whether to count and log the engine's statistics. Only one front end does so.

    Raises:
        ConfigError, EngineError: the start failed. Nothing is left running.
    """
    resolve_parsers(settings.tool_call_parser, settings.reasoning_parser, None)  # an unknown name is an error at once
    name = settings.served_model_names[0] if settings.served_model_names else args.model or EMBEDDED
    engines = args.served_replicas if args.data_parallel_size > 1 else None
    metrics = ServingMetrics(name, records_engine=records_engine, engines=engines)
    request_log = RequestLog() if settings.log_requests else None
    observers: list[EngineObserver] = [metrics] if request_log is None else [metrics, request_log]
    if records_engine and settings.log_stats_interval:
        observers += [StatsLog(settings.log_stats_interval, each) for each in engines or (None,)]
    tracing = None
    if settings.otlp_traces_endpoint is not None:
        tracing = await asyncio.to_thread(RequestTracing, name, settings.otlp_traces_endpoint)
        observers.append(tracing)
    limits = QueueLimits(
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        max_call_sequences=MAX_CALL_SEQUENCES,
    )
    # fastapi takes the longest to import, and is not needed before the engine is ready
    app_module = asyncio.create_task(asyncio.to_thread(importlib.import_module, "inflight.entrypoints.http.app"))
    if engine_sockets:
        engine = await AsyncLLM.attach(args, *engine_sockets, limits=limits, observers=observers)
    else:
        engine = await AsyncLLM.from_args(args, limits=limits, observers=observers)
    clock.mark("engine")
    metrics.count_images(engine.input_processor.images.totals)
    for number, num_tokens in zip(args.served_replicas, engine.num_kv_cache_tokens, strict=True):
        metrics.kv_cache_made(engine.model.block_size, num_tokens // engine.model.block_size, number)
    try:
        app = (await app_module).build_app(engine, settings, metrics=metrics, request_log=request_log)
    except BaseException:
        await engine.close()
        raise
    gc.collect()
    gc.freeze()  # otherwise a garbage collection scans all modules and the model, which delays every stream
    clock.mark("app")
    return ServedModel(name, engine, app, metrics, app.state.beside, tracing)
