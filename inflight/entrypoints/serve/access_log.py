"""`AccessLog`: a line for every request when it has ended, and its figures for the metrics.

A line has the method, the path without its query, status, seconds, bytes, request id and client. Never headers, bodies or
queries: these hold keys and prompts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from inflight.entrypoints.serve.error_response import ASGIApp, Message, Receive, Scope, Send

_MAX_PATH = 256
CLIENT_CLOSED = 499  # nginx's number for a client that left before the response began

Observe = Callable[[str, int, float], None]  # (route, status, seconds)


class AccessLog:
    """
    Args:
        kind: "text", "json", or "off".
        observe: is told the route (the template, as /v1/models/{model}; "unmatched" for none: the number of different ones
            is bounded), the status and the seconds.
        file: where lines go.
    """

    def __init__(self, app: ASGIApp, kind: str, observe: Observe | None = None, file: TextIO = sys.stdout) -> None:
        self._app = app
        self._format = {"text": _as_text, "json": json.dumps, "off": None}[kind]
        self._observe = observe
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        status, num_bytes = CLIENT_CLOSED, 0

        async def count(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, count)
        except Exception:  # the server answers it with a 500, and logs it
            status = 500
            raise
        finally:
            self._report(scope, status, num_bytes, time.monotonic() - start)

    def _report(self, scope: Scope, status: int, num_bytes: int, seconds: float) -> None:
        if self._observe is not None:
            self._observe(getattr(scope.get("route"), "path", "unmatched"), status, seconds)
        if self._format is None:
            return
        client = scope.get("client")
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": client[0] if client else "-",
            "method": scope["method"],
            "path": _printable(scope["path"]),
            "status": status,
            "seconds": round(seconds, 4),
            "bytes": num_bytes,
            "request_id": scope.get("state", {}).get("request_id", "-"),
        }
        self._file.write(self._format(entry) + "\n")
        self._file.flush()


def _as_text(entry: dict[str, object]) -> str:
    return '{time} {client} "{method} {path}" {status} {seconds}s {bytes}B {request_id}'.format(**entry)


def _printable(path: str) -> str:
    """No line breaks, no terminal sequences, no quotes, no end of the disk."""
    return "".join(c if c.isprintable() and c != '"' else "?" for c in path[:_MAX_PATH])
