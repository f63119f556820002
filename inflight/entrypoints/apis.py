"""`APIS`: the table of the APIs that the server has. A row is all that the rest of the server knows of an API."""

import re
from collections.abc import MutableMapping
from typing import Any

from inflight.entrypoints.anthropic import api as anthropic
from inflight.entrypoints.engine_api import api as engine_api
from inflight.entrypoints.http.api import Api, ErrorForm, plain_error
from inflight.entrypoints.ollama import api as ollama
from inflight.entrypoints.openai import api as openai
from inflight.entrypoints.pooling_api import api as pooling_api
from inflight.entrypoints.responses_api import api as responses_api

APIS: dict[str, Api] = {
    "openai": openai.API,
    "responses": responses_api.API,
    "anthropic": anthropic.API,
    "ollama": ollama.API,
    "pooling": pooling_api.API,
    "engine": engine_api.API,
}

# Endpoints that belong to no API, with their methods as in `Api.endpoints`
OPERATIONS = {
    **dict.fromkeys("/version /health /ready /fault_tolerance/status /metrics /docs /openapi.json".split(), "GET"),
    "/ping": "GET POST",
    "/reset_prefix_cache": "POST",
}


def api_at(path: str) -> Api | None:
    """The API that has this path for itself. None if there is none, or if its errors have the plain form."""
    return next((api for api in APIS.values() if api.has_path(path)), None)


def methods_of(path: str) -> list[str]:
    """The methods that this path has; none if no endpoint has the path."""
    tables = [OPERATIONS, *(api.endpoints for api in APIS.values())]
    exact = [table[path] for table in tables if path in table]
    similar = (methods for table in tables for pattern, methods in table.items() if _fits(pattern, path))
    return [method for methods in (exact or similar) for method in methods.split()]


def error_form(scope: MutableMapping[str, Any]) -> ErrorForm:  # Any: ASGI's own
    """The form of errors that the client of a request reads."""
    path = scope["path"]
    sent = {name for name, _ in scope.get("headers", ())}
    found = (api.error_form for api in APIS.values() if api.header in sent or api.has_path(path))
    return next(found, plain_error)


def without_version(path: str) -> bool:
    """Whether /v1 is missing before this path: some clients leave it out of their base URL."""
    return any(_is_at_or_below(path, own) for api in APIS.values() for own in api.versioned)


def base_urls() -> dict[str, str]:
    """What clients add to the server's address -> the names of their APIs."""
    found: dict[str, list[str]] = {}
    for api in APIS.values():
        if api.title:
            found.setdefault(api.base_path, []).append(api.title)
    return {base_path: ", ".join(titles) for base_path, titles in found.items()}


def examples_of(path: str) -> str | None:
    """Some paths that begin with this one, which is no path itself; None if there are none."""
    path = path.rstrip("/")
    return next((api.examples[path] for api in APIS.values() if path in api.examples), None)


def instead_of(path: str) -> str:
    """What to use instead of a path that an API has elsewhere; "" for an unknown path."""
    path = path.rstrip("/").removeprefix("/v1")
    known = ((begin, text) for api in APIS.values() for begin, text in api.instead.items())
    return next((text for begin, text in known if _is_at_or_below(path, begin)), "")


def _is_at_or_below(path: str, begin: str) -> bool:
    return path == begin or path.startswith(f"{begin}/")


def _fits(pattern: str, path: str) -> bool:
    expression = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", "[^/]+")
    return "*" in pattern and re.fullmatch(expression, path) is not None
