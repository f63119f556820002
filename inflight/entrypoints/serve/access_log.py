"""`AccessLog`: when a request has ended, writes a line about it and counts it in the metrics.

A line has the time, the client's address, the method, the path without its query, the status, the seconds until the response
has ended, the bytes of the response's body, and the request id. It never has headers, bodies or queries, because they may
contain keys and prompts. There is no line for a health check or a read of /metrics that is answered with 200, because such
requests come every few seconds.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from inflight.entrypoints.serve.asgi import PROBES, SENT_METHOD, ASGIApp, Message, Receive, Scope, Send
from inflight.line_writer import LineWriter

logger = logging.getLogger(__name__)

_TEXT = '{time} {client} "{method} {path}" {status} {seconds}s {bytes}B {request_id}'
_MAX_PATH = 256
_NOT_LOGGED = PROBES | {"/metrics"}
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected before the response began

Observe = Callable[[str, int, float], None]  # (route, status, seconds)


class AccessLog:
    """
    Args:
        kind: "text", "json", or "off".
        observe: called with route, status and seconds of each request. The route is the app's pattern for the path, such as
            /v1/models/{model}, or "unmatched" if no pattern fits. So the number of different routes is bounded.
        lines: writes the lines. If None, no lines are written.
    """

    def __init__(
        self, app: ASGIApp, kind: str, observe: Observe | None = None, lines: LineWriter | None = None
    ) -> None:
        self._app = app
        self._format = {"text": _TEXT.format_map, "json": json.dumps, "off": None}[kind]
        self._observe = observe
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        scope.setdefault("state", {})["arrival_time"] = start  # deadlines and latencies start at this time
        status = CLIENT_CLOSED
        num_bytes = 0

        async def count(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, count)
        except Exception:  # uvicorn logs the error and answers with status 500
            status = 500
            raise
        finally:
            self._report(scope, status, num_bytes, time.monotonic() - start)

    def _report(self, scope: Scope, status: int, num_bytes: int, seconds: float) -> None:
        if self._observe is not None:
            self._observe(getattr(scope.get("route"), "path", "unmatched"), status, seconds)
        if self._format is None or self._lines is None or (status == 200 and scope["path"] in _NOT_LOGGED):
            return
        client = scope.get("client")
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": _printable(client[0]) if client else "-",
            "method": scope.get("state", {}).get(SENT_METHOD, scope["method"]),
            "path": _printable(scope["path"]),
            "status": status,
            "seconds": round(seconds, 4),
            "bytes": num_bytes,
            "request_id": scope.get("state", {}).get("request_id", "-"),
        }
        self._lines.put(self._format(entry) + "\n")


def report_dropped(num_dropped: int) -> None:
    """What a `LineWriter` for the access log reports."""
    logger.warning(
        "%d lines of the access log were dropped so far: stdout cannot be written fast enough or at all", num_dropped
    )


def _printable(path: str) -> str:
    """A path or an address for the log: shortened, and without line breaks, terminal sequences and quotation marks."""
    return "".join(c if c.isprintable() and c != '"' else "?" for c in path[:_MAX_PATH])
