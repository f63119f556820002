"""`Spellings`: other spellings of a request: /v1/models/ is the route /v1/models, and HEAD is GET without the body."""

from __future__ import annotations

from inflight.entrypoints.serve.asgi import ASGIApp, Receive, Scope, Send

SENT_METHOD = "sent_method"  # key in scope["state"] of the method that the client sent, if the scope has another one


class Spellings:
    """The outermost middleware, so that all others see the same path and method as the app.

    uvicorn keeps the original scope, with HEAD as the method, and therefore sends no body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if len(path) > 1 and path.endswith("/"):
            scope = {**scope, "path": path[:-1]}
        if method == "HEAD":
            scope = {**scope, "method": "GET", "state": {**scope.get("state", {}), SENT_METHOD: method}}
        await self._app(scope, receive, send)
