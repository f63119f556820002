"""`Spellings`: removes a last slash and a proxy's prefix from paths, and lets the app answer HEAD like GET."""

from __future__ import annotations

from inflight.entrypoints.serve.asgi import ASGIApp, Receive, Scope, Send

SENT_METHOD = "sent_method"  # key in scope["state"]: the method that the client sent, if it was HEAD


class Spellings:
    """Only uvicorn's ProxyHeaders comes before this middleware, so all others see the same path and method as the app.

    The app sees HEAD as GET. uvicorn still has the original scope, so it sends no body.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        """`root_path`: a prefix that is removed from each path that begins with it."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if self._root_path and path.startswith(f"{self._root_path}/"):
            path = path.removeprefix(self._root_path)
        if len(path) > 1 and path.endswith("/"):
            path = path[:-1]
        if path != scope["path"]:
            scope = {**scope, "path": path}
        if method == "HEAD":
            scope = {**scope, "method": "GET", "state": {**scope.get("state", {}), SENT_METHOD: method}}
        await self._app(scope, receive, send)
