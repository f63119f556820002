"""`AccessLog`: when a request has come; and when it has ended, a line for it, and its figures for the metrics.

Probes and scrapes that went well have none: they come every few seconds. A line has the method, the path without its query,
status, seconds, bytes, request id and client. Never headers, bodies or queries: these hold keys and prompts.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from inflight.entrypoints.serve.error_response import ASGIApp, Message, Receive, Scope, Send
from inflight.entrypoints.serve.probes import PROBES
from inflight.entrypoints.serve.spellings import SENT_METHOD

logger = logging.getLogger(__name__)

_MAX_PATH = 256
MAX_LINES = 10_000  # that wait to be written: seconds of a busy server
STDOUT = 1
_NOT_LOGGED = PROBES | {"/metrics"}
CLIENT_CLOSED = 499  # nginx's number for a client that left before the response began

Observe = Callable[[str, int, float], None]  # (route, status, seconds)


class AccessLog:
    """
    Args:
        kind: "text", "json", or "off".
        observe: is told the route (the template, as /v1/models/{model}; "unmatched" for none: the number of different ones
            is bounded), the status and the seconds.
        lines: where they go; None with "off".
    """

    def __init__(
        self, app: ASGIApp, kind: str, observe: Observe | None = None, lines: LineWriter | None = None
    ) -> None:
        self._app = app
        self._format = {"text": _as_text, "json": json.dumps, "off": None}[kind]
        self._observe = observe
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        scope.setdefault("state", {})["arrival_time"] = start  # deadlines and latencies count from here
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
        if self._format is None or self._lines is None or (status == 200 and scope["path"] in _NOT_LOGGED):
            return
        client = scope.get("client")
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": client[0] if client else "-",
            "method": scope.get("state", {}).get(SENT_METHOD, scope["method"]),
            "path": _printable(scope["path"]),
            "status": status,
            "seconds": round(seconds, 4),
            "bytes": num_bytes,
            "request_id": scope.get("state", {}).get("request_id", "-"),
        }
        self._lines.put(self._format(entry) + "\n")


class LineWriter:
    """Writes on a thread of its own: whoever reads the lines may stand still, and no stream waits for that. What finds no room,
    or no reader, is dropped and counted; the log says so once, and how many at the end.

    The descriptor is written to, not sys.stdout, whose lock would then be held while a pipe is full, also at the end.
    """

    def __init__(self, fd: int = STDOUT) -> None:
        self.num_dropped = 0
        self._fd = fd
        self._lock = threading.Lock()  # of num_dropped
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="inflight-access-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Never blocks, never fails."""
        if self._queue.qsize() < MAX_LINES:
            self._queue.put(line.encode(errors="replace"))
        else:
            self._drop()

    def close(self, timeout: float) -> None:
        """Write what is left, for `timeout` seconds at most. To be called once; blocks."""
        self._queue.put(None)
        self._thread.join(timeout)
        if self.num_dropped:
            logger.warning("%d lines of the access log were dropped", self.num_dropped)

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:  # nobody reads it any more, or the disk is full
                self._drop()

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1
            is_first = self.num_dropped == 1
        if is_first:
            logger.warning("lines of the access log are dropped: it cannot be written, or not as fast as they come")


def _as_text(entry: dict[str, object]) -> str:
    return '{time} {client} "{method} {path}" {status} {seconds}s {bytes}B {request_id}'.format(**entry)


def _printable(path: str) -> str:
    """No line breaks, no terminal sequences, no quotes, no end of the disk."""
    return "".join(c if c.isprintable() and c != '"' else "?" for c in path[:_MAX_PATH])
