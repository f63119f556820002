"""`Gate`: refuses requests while the engine starts, after a shutdown has begun, and once the engine is dead.

    STARTING --open--> READY --drain--> DRAINING
        \\________________|_________________|--fail--> DEAD

In every phase the gate answers /live with 200, because the process runs. In READY the app answers all other paths. In DRAINING
and DEAD the app still answers the paths in `_WHILE_DRAINING`. The gate refuses all other requests with status 503.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from inflight.entrypoints.serve.asgi import PROBES, ASGIApp, Message, Receive, Scope, Send, send_error, send_json


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_WHY = {
    Phase.STARTING: "the engine is starting",
    Phase.DRAINING: "the server is shutting down",
    Phase.DEAD: "the engine has failed, and the server is shutting down",
}
# The app answers these paths even when the server drains or the engine is dead, because they give the engine no work.
_WHILE_DRAINING = frozenset({"/health", "/metrics", "/ping", "/version"})


class Gate:
    """Used by one event loop. `on_refusal` is called with the name of the phase for each refused request, but not for a refused
    health check."""

    def __init__(self, on_refusal: Callable[[str], None]) -> None:
        self.phase = Phase.STARTING
        self._on_refusal = on_refusal
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """Pass requests to `app`, because the engine is ready. Does nothing if the server drains or has failed."""
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY
            self._app = app

    def drain(self) -> None:
        """Refuse new requests, and close every connection after its response."""
        if self.phase is not Phase.DEAD:
            self.phase = Phase.DRAINING

    def fail(self) -> None:
        self.phase = Phase.DEAD

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self.phase not in (Phase.STARTING, Phase.READY):
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        path = scope["path"]
        if path == "/live":
            await send_json(send_and_close, 200, {"status": "live"})
        elif self._app is not None and (
            self.phase is Phase.READY or (self.phase is not Phase.STARTING and path in _WHILE_DRAINING)
        ):
            await self._app(scope, receive, send_and_close)
        else:
            if path not in PROBES:
                self._on_refusal(self.phase.value)
            message = f"{_WHY[self.phase]}; try again later"
            code = f"server_{self.phase.value}"
            await send_error(scope, send_and_close, 503, message, kind="server_error", code=code)
