"""`unserved`: the answer to a request whose path, or whose method at this path, no endpoint has.

A server with one model and one with several (router/) answer in the same way.
"""

from collections.abc import Iterable, MutableMapping
from typing import Any

from starlette.responses import Response

from inflight.entrypoints.apis import error_form, examples_of, instead_of
from inflight.entrypoints.http.errors import ApiError


def unserved(scope: MutableMapping[str, Any], methods: Iterable[str]) -> Response:  # Any: ASGI's own
    """`methods`: those that the path has; none if there is no such path."""
    path, method = scope["path"], scope["method"]
    allowed = sorted(set(methods))
    if not allowed:
        return ApiError(404, _no_such_path(path), code="not_found").response(error_form(scope))
    if "GET" in allowed:
        allowed.append("HEAD")  # the server answers HEAD like GET
    if method == "OPTIONS":  # say which methods the path has
        return Response(status_code=204, headers={"Allow": ", ".join([*allowed, method])})
    message = f"{path} does not support the method {method}"
    error = ApiError(405, message, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})
    return error.response(error_form(scope))


def _no_such_path(path: str) -> str:
    if (examples := examples_of(path)) is not None:
        return f"there is no page at {path}: this is how paths begin, such as {examples}; browsers find a page at /"
    return f"there is no {path} here{instead_of(path)}; the API is under /v1, its description at /docs"
