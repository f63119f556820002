"""Starts what answers: the engine, its observers, and the app. The one module of `serve/` whose imports take long."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import cast

from inflight.config.engine_args import EngineArgs
from inflight.engine.admission import QueueLimits
from inflight.engine.async_llm import AsyncLLM
from inflight.entrypoints.openai.app import build_app
from inflight.entrypoints.serve.error_response import ASGIApp
from inflight.entrypoints.serve.server import Running
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.start_up import StartUpClock
from inflight.errors import ConfigError, InvalidRequestError
from inflight.metrics.observer import EngineObserver
from inflight.metrics.serving import ServingMetrics
from inflight.metrics.tracing import RequestTracing

logger = logging.getLogger(__name__)


async def start(settings: ServerSettings, args: EngineArgs, clock: StartUpClock) -> Running:
    """
    Raises:
        ConfigError, EngineError: nothing is left running.
    """
    name = settings.served_model_names[0] if settings.served_model_names else args.model or "embedded"
    metrics = ServingMetrics(name)
    observers: list[EngineObserver] = [metrics]
    if settings.otlp_traces_endpoint is not None:
        observers.append(await asyncio.to_thread(RequestTracing, name, settings.otlp_traces_endpoint))
    limits = QueueLimits(max_queued_requests=settings.max_queued_requests, max_queued_tokens=settings.max_queued_tokens)
    engine = await AsyncLLM.from_args(args, limits=limits, observers=observers)
    clock.mark("engine")
    try:
        app = build_app(engine, settings, metrics=metrics)
    except BaseException as error:
        await engine.close()
        if isinstance(error, InvalidRequestError):  # a parser that is not known: here it is the operator's mistake
            raise ConfigError(str(error)) from error
        raise
    gc.collect()
    gc.freeze()  # what has been made so far stays: a collection that looks through it all holds up every stream
    clock.mark("app")
    logger.info(
        "ready: %s serves %s, max_model_len %d, %d KV tokens, after %s",
        settings.url,
        name,
        engine.model.max_model_len,
        engine.model.num_kv_cache_tokens,
        clock.summary(),
    )
    return Running(engine=engine, app=cast("ASGIApp", app), observe=metrics.http_request)
