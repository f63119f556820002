"""`Spellings`: other ways to ask for a route that is there: /v1/models/ is /v1/models, and HEAD is GET without the body."""

from __future__ import annotations

from inflight.entrypoints.serve.error_response import ASGIApp, Receive, Scope, Send

SENT_METHOD = "sent_method"  # in scope["state"], where it is not the scope's own


class Spellings:
    """The outermost of all: whatever checks a path or a method behind it sees what the app sees.

    The server that calls it keeps the scope that came, and so leaves out the body of an answer to HEAD.
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
