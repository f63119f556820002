"""Puts the middlewares around the app in the right order, and contains the small ones.

A request passes them in this order. Its response passes them in the reverse order, from the middleware or app that sends it.

ProxyHeaders     uvicorn's: replaces the address of a trusted proxy by the client's address, which the proxy names
Spellings        removes a last slash and a proxy's prefix from the path, adds a missing /v1, and turns HEAD into GET
RequestIds       gives each request and its response an id, even if the request is refused
AccessLog        writes a line for each request and counts the request in the metrics
SizeLimits       limits headers and bodies, before any other part reads the body
AllowedHosts     refuses host names that are not allowed; comes before CORS, because CORS answers preflights itself
CORS             adds the headers that let web pages read a response, even a refusal; answers preflights
PageFiles        sends browsers the files of the page, which need no key
Authentication   refuses a client without a key, before the app could show which routes exist
Gate             answers with 503 while the engine starts, while the server drains (shuts down), and when the engine is dead
the app
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from inflight.engine.serving.client import CLIENT
from inflight.entrypoints.apis import without_version
from inflight.entrypoints.page.page_files import PageFiles
from inflight.entrypoints.serve.access_log import AccessLog, Observe
from inflight.entrypoints.serve.api_keys import ApiKeys, digest
from inflight.entrypoints.serve.asgi import (
    PROBES,
    SENT_METHOD,
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
    header_of,
    send_error,
)
from inflight.entrypoints.serve.browser_page import BrowserPage
from inflight.entrypoints.serve.settings import ANY_ADDRESS, REQUEST_ID_PATTERN, ServerSettings, is_address, is_loopback
from inflight.entrypoints.serve.size_limits import SizeLimits
from inflight.interface.image_prompts import OWNER
from inflight.line_writer import LineWriter

REQUEST_ID_HEADER = b"x-request-id"
_ACCEPTED_ID = re.compile(REQUEST_ID_PATTERN.encode())
_SLASHES = re.compile(r"/{2,}")
ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/v1/engine/abort"})  # what they do concerns all clients
_ADMIN_PATHS_OF_SEVERAL = frozenset({"/v1/models/load", "/v1/models/unload", "/api/pull", "/api/delete"})
_MAX_SHOWN = 100  # characters of a refused name
_HOW_TO_SEND = "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"


def wrap(
    app: ASGIApp,
    settings: ServerSettings,
    observe: Observe | None = None,
    lines: LineWriter | None = None,
    keys: ApiKeys | None = None,
) -> ASGIApp:
    """Returns `app`, which is the `Gate` in a server, with all other middlewares around it. If `lines` is None, there is no
    access log, even if the settings ask for an access log. If `keys` is None, the keys of the settings are used."""
    keys = keys or ApiKeys(settings.api_keys, settings.api_key_file)
    admin_keys = ApiKeys(settings.admin_keys)
    admin_paths = ADMIN_PATHS | (_ADMIN_PATHS_OF_SEVERAL if settings.serves_several_models else frozenset())
    app = Authentication(app, keys, admin_keys, admin_paths, metrics_public=settings.metrics_public)
    if settings.ui:
        app = PageFiles(app)
    else:
        app = BrowserPage(app, settings.url, settings.root_path, has_docs=not settings.disable_fastapi_docs)
    if settings.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware  # the import delays the first answer

        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=["X-Request-Id", "X-Ignored-Fields", "Retry-After"],
        )
    app = AllowedHosts(app, settings.accepted_hosts)
    app = SizeLimits(app, settings)
    app = AccessLog(app, settings.access_log, observe, lines)
    app = Spellings(RequestIds(app), settings.root_path)
    # Any: uvicorn's own types
    return cast("ASGIApp", ProxyHeadersMiddleware(cast("Any", app), settings.trusted_proxies))


class Spellings:
    """Removes repeated slashes, a last slash and the prefix `root_path` from paths, adds the /v1 that is missing in the base
    URL of some clients, and shows HEAD to the app as GET. uvicorn keeps the original scope, in which the method is HEAD, so it
    does not send the body of the app's response.

    Only uvicorn's ProxyHeaders comes before this middleware, so all other middlewares see the same path and method as the app.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _single_slashes(scope["path"])
        method = scope["method"]
        if self._root_path and path.startswith(f"{self._root_path}/"):
            path = path.removeprefix(self._root_path)
        if len(path) > 1 and path.endswith("/"):
            path = path[:-1]
        if without_version(path):
            path = f"/v1{path}"
        if path != scope["path"]:
            scope = {**scope, "path": path}
        if method == "HEAD":
            scope = {**scope, "method": "GET", "state": {**scope.get("state", {}), SENT_METHOD: method}}
        await self._app(scope, receive, send)


def _single_slashes(path: str) -> str:
    """The path with one slash where there are several: a base URL that ends in a slash makes /v1//models. The name of a model
    behind /models/ may have several."""
    if "//" not in path:
        return path
    before, models, name = path.partition("/models/")
    return _SLASHES.sub("/", before + models) + (name.strip("/") and name)


class RequestIds:
    """Puts the id of each request into scope["state"]["request_id"], and into the header X-Request-Id of the response.

    A client may choose the id with the same header. If the client's id is too long or has characters that are not accepted, a
    random id is used instead. If the client chose none, scope["state"]["has_own_id"] is False, and the app may replace the id
    until the response starts.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header_of(scope, REQUEST_ID_HEADER)
        state = scope.setdefault("state", {})
        state["has_own_id"] = given is not None and _ACCEPTED_ID.fullmatch(given) is not None
        state["request_id"] = given.decode() if given is not None and state["has_own_id"] else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message.get("headers", ()) if header[0].lower() != REQUEST_ID_HEADER]
                message = {**message, "headers": [*headers, (REQUEST_ID_HEADER, state["request_id"].encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class AllowedHosts:
    """Refuses requests whose `Host` header has a name that is not allowed.

    Args:
        allowed: names without a port. "*.example.com" allows every name below example.com, "*" every name, and `ANY_ADDRESS`
            every address. Loopback addresses are always allowed. The attack that this class prevents is DNS rebinding (see
            `ServerSettings.accepted_hosts`), and this attack needs a host name.

    A request without `Host` (HTTP/1.0) is allowed, because browsers, which the attack needs, always send `Host`. A health check
    is allowed, because its answer contains nothing that a web page could use. If there are several `Host` headers, all of them
    must be allowed, because a proxy may have checked only one of them.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allows_all = "*" in allowed
        self._allows_addresses = ANY_ADDRESS in allowed
        self._names = frozenset(_without_port(name) for name in allowed if not name.startswith("*."))
        self._endings = tuple(name[1:].lower() for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        refused = [value for value in given if not self._allows(value.decode("latin-1"))]
        if self._allows_all or not refused or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        shown = refused[0].decode("ascii", "replace")[:_MAX_SHOWN]
        message = (
            f"the Host header has {shown!r}, which is not an allowed name of this server. Allowed are the names of "
            "--allowed-hosts. Without this option, a server that asks for no key allows only addresses, localhost and the name "
            "of its machine. Use one of these, or start the server with --allowed-hosts NAME or with an API key"
        )
        await send_error(scope, send, 403, message, kind="invalid_request_error", code="host_not_allowed")

    def _allows(self, given: str) -> bool:
        name = _without_port(given)
        if name in self._names or name.endswith(self._endings):
            return True
        return is_address(name) if self._allows_addresses else is_loopback(name)


def _without_port(host: str) -> str:
    """The name in a `Host` header: "localhost" for "LocalHost.:80", and "::1" for "[::1]:80"."""
    host = host.strip().lower()
    if host.startswith("["):
        name, end, rest = host[1:].partition("]")
        return name if end and rest[:1] in ("", ":") else host
    if host.count(":") <= 1:
        return host.partition(":")[0].removesuffix(".")
    return host


class Authentication:
    """If the server has keys, a request needs `Authorization: Bearer KEY` or `x-api-key: KEY`. Health checks need no key, and
    if `metrics_public`, /metrics needs none. CORS preflights have no key, but the CORS middleware answers them before they
    come here. If the server has admin keys, `admin_paths` need one of them. An admin key is good for every other path, too.

    A request without a valid key does not reach the app, so its client cannot find out which routes exist.

    For the app, all requests with the same key are one client's (`CLIENT`), and without keys those of one connection.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, admin_keys: ApiKeys, admin_paths: Collection[str], *, metrics_public: bool
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys
        self._admin_paths = admin_paths
        self._public = PROBES | ({"/metrics"} if metrics_public else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_for_admin = bool(self._admin_keys) and scope["path"] in self._admin_paths
        needs_no_key = not is_for_admin and (not self._keys or scope["path"] in self._public)
        shown = [] if needs_no_key else list(_shown_keys(scope))
        accepted = next(filter(self._admin_keys.accepts if is_for_admin else self._accepts, shown), None)
        if needs_no_key or accepted is not None:
            key = "" if accepted is None else digest(accepted).hex()
            OWNER.set(key)
            CLIENT.set(key or str(scope.get("client")))
            await self._app(scope, receive, send)
            return
        message = "Incorrect API key provided." if shown else f"No API key was given: {_HOW_TO_SEND}."
        kind = "invalid_request_error"
        headers = [(b"www-authenticate", b"Bearer")]
        await send_error(scope, send, 401, message, kind=kind, code="invalid_api_key", headers=headers)

    def _accepts(self, shown: bytes) -> bool:
        return self._keys.accepts(shown) | self._admin_keys.accepts(shown)


def _shown_keys(scope: Scope) -> Iterator[bytes]:
    """The keys in a request's headers. If a header comes twice, or `Authorization` has no key, the result has the key b"",
    which no server has. A proxy may have checked only one of two headers."""
    for wanted in (b"authorization", b"x-api-key"):
        given = [value for name, value in scope["headers"] if name == wanted]
        if not given:
            continue
        value = given[0] if len(given) == 1 else b""
        if wanted == b"authorization":
            scheme, _, key = value.partition(b" ")
            value = key if scheme.lower() == b"bearer" else b""
        yield value.strip()
