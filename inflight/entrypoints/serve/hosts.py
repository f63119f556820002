"""`AllowedHosts`: refuses requests whose `Host` header has a name that is not allowed."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.entrypoints.serve.error_response import ASGIApp, Receive, Scope, Send, send_error
from inflight.entrypoints.serve.probes import PROBES
from inflight.entrypoints.serve.settings import is_loopback

_MAX_SHOWN = 100  # characters of a refused name


class AllowedHosts:
    """
    Args:
        allowed: names without a port; "*.example.com" is every name below example.com, "*" is every name. Loopback addresses
            are always allowed: a web page cannot have one as its name.

    A request without `Host` (HTTP/1.0) passes: no browser sends one. So does a probe: its answer has nothing that a web page
    could use. If there are several `Host` headers, all have to be allowed: a proxy may have looked at another one than this
    server would.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allows_all = "*" in allowed
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
            f"the Host header has {shown!r}, which is not an allowed name of this server. The server was started with "
            "--allowed-hosts, or it listens on loopback and asks for no key, so only local names are allowed. Use an allowed "
            "name, let the proxy send one, or start the server with --allowed-hosts NAME or with an API key"
        )
        await send_error(send, 403, message, kind="invalid_request_error", code="host_not_allowed")

    def _allows(self, given: str) -> bool:
        name = _without_port(given)
        return name in self._names or name.endswith(self._endings) or is_loopback(name)


def _without_port(host: str) -> str:
    """ "LocalHost.:80" is localhost, "[::1]:80" is ::1."""
    host = host.strip().lower()
    if host.startswith("["):
        name, end, rest = host[1:].partition("]")
        return name if end and rest[:1] in ("", ":") else host
    return host.partition(":")[0].removesuffix(".") if host.count(":") <= 1 else host
