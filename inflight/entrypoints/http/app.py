"""`build_app`: makes the HTTP application of one engine. Middlewares around it check keys, limit bodies and write logs."""

import importlib

from fastapi import FastAPI

import inflight
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.entrypoints.apis import APIS
from inflight.entrypoints.http.api_page import add_api_page
from inflight.entrypoints.http.error_handlers import add_error_handlers
from inflight.entrypoints.http.operations import add_operation_routes
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.strict_json import JsonRoute
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.metrics.log_lines import RequestLog
from inflight.metrics.serving import ServingMetrics


def build_app(
    engine: AsyncLLM, settings: ServerSettings, *, metrics: ServingMetrics, request_log: RequestLog | None = None
) -> FastAPI:
    """The caller must start and close `engine`.

    Raises:
        ConfigError: the settings name a parser that does not exist.
    """
    app = FastAPI(
        title="Inflight",
        version=inflight.__version__,
        root_path=settings.root_path,
        openapi_url=None if settings.disable_fastapi_docs else "/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = JsonRoute
    app.state.request_timeout = settings.request_timeout
    app.state.allowed_origins = settings.allowed_origins
    server = ApiServer(engine, settings, metrics, request_log)
    app.state.beside = server.beside
    add_error_handlers(app)
    for api in APIS.values():
        importlib.import_module(api.routes).add_routes(app, server)
    add_operation_routes(app, server)
    if not settings.disable_fastapi_docs:
        add_api_page(app)
    return app
