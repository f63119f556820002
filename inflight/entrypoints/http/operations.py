"""The endpoints for whoever runs the server: version, health, faults, metrics, the prefix cache."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

import inflight
from inflight.entrypoints.http.bodies import Readiness, Status, Version
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.respond import ERRORS
from inflight.entrypoints.http.server import ApiServer
from inflight.errors import EngineError, EngineRecoveringError
from inflight.interface.statistics import FaultStatus


def add_operation_routes(app: FastAPI, server: ApiServer) -> None:
    engine, metrics = server.engine, server.metrics

    async def version() -> Version:
        return {"version": inflight.__version__}

    async def health() -> Status:
        """Whether the engine's process is alive."""
        await engine.check_health()
        return {"status": "healthy"}

    async def ready() -> Readiness:
        """Whether new requests are accepted and the engine makes progress with them. One of several replicas is enough."""
        if engine.is_draining:
            raise ApiError(503, "the server is shutting down", type="server_error", code="shutting_down")
        try:
            replicas = await engine.check_ready()
        except EngineRecoveringError as error:
            raise ApiError(503, str(error), type="server_error", code="engine_recovering") from error
        except EngineError as error:
            raise ApiError(503, "the engine makes no steps", type="server_error", code="not_ready") from error
        if len(replicas) == 1:
            return {"status": "ready"}
        engines = {
            str(index): "ready"
            if error is None
            else "recovering"
            if isinstance(error, EngineRecoveringError)
            else "not ready"
            for index, error in replicas.items()
        }
        return {"status": "ready", "engines": engines}

    async def fault_tolerance_status() -> FaultStatus:
        """Whether the engine recovers from a fault, and which recoveries there were."""
        return engine.fault_status

    async def reset_prefix_cache(reset_connector: bool = False) -> Status:
        """Forget the KV blocks of earlier prompts; with reset_connector=true also those in host memory and tiers."""
        await engine.reset_prefix_cache(reset_connector=reset_connector)
        return {"status": "reset"}

    for path, endpoint in (("/version", version), ("/health", health), ("/ready", ready)):
        app.add_api_route(path, endpoint, methods=["GET"], responses=ERRORS)
    app.add_api_route("/fault_tolerance/status", fault_tolerance_status, methods=["GET"], responses=ERRORS)
    # /ping is not in the OpenAPI document, because its two methods would have the same operation id there
    app.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)
    app.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"], responses=ERRORS)

    async def show_metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    app.add_api_route("/metrics", show_metrics, methods=["GET"], response_class=Response, responses=ERRORS)
