"""What all middlewares use: ASGI's types, JSON answers, errors, and the paths of health checks (probes)."""

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any

from inflight.entrypoints.apis import error_form

Message = MutableMapping[str, Any]  # Any: ASGI's own messages
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# The paths of health checks. Their requests need no key, and may have any host name. The access log has no line for a health
# check that is answered with 200.
PROBES = frozenset({"/health", "/live", "/ping", "/ready"})
RETRY_AFTER_SECONDS = 5
OTHER_SITE = (
    "a web page of another site may not send this request; to allow it, start the server with --allowed-origin ORIGIN"
)
OTHER_SITE_CODE = "cross_site_request"
SENT_METHOD = "sent_method"  # key in scope["state"]: the method that the client sent, if it was HEAD


async def send_error(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    *,
    kind: str,
    code: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Send an error of the type `kind` in the form that the client reads. With status 503, `Retry-After` is sent, too."""
    error = error_form(scope)(status, message, kind, None, code)
    retry = [(b"retry-after", b"%d" % RETRY_AFTER_SECONDS)] if status == 503 else []
    await send_json(send, status, error, [*headers, *retry])


async def send_json(send: Send, status: int, value: object, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    await send_body(send, status, json.dumps(value).encode(), b"application/json", headers)


async def send_body(
    send: Send, status: int, body: bytes, content_type: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    fixed = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


def is_of_other_site(scope: Scope, allowed_origins: Collection[str]) -> bool:
    """Whether a browser has sent the request for a page of another site, which is none of `allowed_origins`.

    Before such a page sends JSON, the browser asks the server (CORS). Before a GET, a POST without a body, or a POST of plain
    text it does not. So such a request must not change anything.
    """
    origin = (header_of(scope, b"origin") or b"").decode("latin-1")
    if "*" in allowed_origins or (origin and origin in allowed_origins):
        return False
    site = header_of(scope, b"sec-fetch-site")
    if site is None:  # an old browser, or no browser
        host = (header_of(scope, b"host") or b"").decode("latin-1")
        return bool(origin) and origin.partition("://")[2] != host
    return site not in (b"same-origin", b"none")


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The value of the first header with this name, which must be in lower case. None if there is no such header."""
    return next((value for known, value in scope["headers"] if known == name), None)
