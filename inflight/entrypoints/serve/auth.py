"""`Authentication`: a request shows a key, or asks for nothing but health. What is not listed here is refused."""

from __future__ import annotations

from inflight.entrypoints.serve.api_keys import ApiKeys
from inflight.entrypoints.serve.error_response import ASGIApp, Receive, Scope, Send, send_error
from inflight.entrypoints.serve.probes import PROBES


class Authentication:
    """`Authorization: Bearer KEY`. Preflights, which carry no key by their nature, do not come here: CORS answers them.

    Every request without a right key is answered here, so that an unknown route says no more than a known one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, metrics_public: bool) -> None:
        self._app = app
        self._keys = keys
        self._public = PROBES | ({"/metrics"} if metrics_public else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys or scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = shown[0].partition(b" ") if len(shown) == 1 else (b"", b"", b"")
        if scheme.lower() == b"bearer" and self._keys.accepts(key.strip()):
            await self._app(scope, receive, send)
            return
        await send_error(
            send,
            401,
            "Incorrect API key provided." if shown else "No API key was given: send it as `Authorization: Bearer KEY`.",
            kind="invalid_request_error",
            code="invalid_api_key",
            headers=[(b"www-authenticate", b"Bearer")],
        )
