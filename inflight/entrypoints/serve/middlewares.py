"""The order in which a request passes the middlewares. The outermost comes first, and sees every response of those within.

Spellings        gives all that follow one spelling of each path and method
RequestIds       every response, a refusal too, has an id ...
AccessLog        ... and a line in the log, and counts in the metrics
SizeLimits       before anything reads what was sent
AllowedHosts     before CORS: a page under a foreign name learns nothing from preflights
CORS             browsers read a refusal only with its headers; preflights end here
Authentication   nothing behind it is reached without a key, not even the fact that a route exists
Gate             starting, draining, dead: 503
the app
"""

from __future__ import annotations

from typing import cast

from inflight.entrypoints.serve.access_log import AccessLog, LineWriter, Observe
from inflight.entrypoints.serve.api_keys import ApiKeys
from inflight.entrypoints.serve.auth import Authentication
from inflight.entrypoints.serve.error_response import ASGIApp
from inflight.entrypoints.serve.hosts import AllowedHosts
from inflight.entrypoints.serve.request_ids import RequestIds
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.size_limits import SizeLimits
from inflight.entrypoints.serve.spellings import Spellings


def wrap(
    app: ASGIApp, settings: ServerSettings, observe: Observe | None = None, lines: LineWriter | None = None
) -> ASGIApp:
    """The app behind all of them. Without `lines` there is no access log, whatever the settings say."""
    app = Authentication(app, ApiKeys(settings.api_keys), metrics_public=settings.metrics_public)
    if settings.allowed_origins:
        app = _cors(app, settings)
    app = AllowedHosts(app, settings.accepted_hosts)
    app = SizeLimits(
        app,
        max_header_bytes=settings.max_header_bytes,
        max_body_bytes=settings.max_body_bytes,
        max_total_body_bytes=settings.max_total_body_bytes,
    )
    app = AccessLog(app, settings.access_log, observe, lines)
    return Spellings(RequestIds(app), settings.root_path)


def _cors(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    from starlette.middleware.cors import (
        CORSMiddleware,  # off by default, and the first answer comes before this import
    )

    middleware = CORSMiddleware(
        app,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=["X-Request-Id", "X-Ignored-Fields", "Retry-After"],
    )
    return cast("ASGIApp", middleware)
