"""What the log and the metrics say of requests that did not go well."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.serve.access_log import AccessLog, report_dropped
from inflight.entrypoints.serve.asgi import ASGIApp, Message, Receive, Scope, Send, send_json
from inflight.entrypoints.serve.middlewares import Spellings
from inflight.line_writer import LineWriter


async def leaves(scope: Scope, receive: Receive, send: Send) -> None:
    """An app whose client has gone before there is an answer."""


async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("a defect")


async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"some", "more_body": True})
    await send({"type": "http.response.body", "body": b" words", "more_body": True})


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, 503, {})


def reported(
    app: ASGIApp, folder: Path, path: str = "/v1/completions", method: str = "POST"
) -> tuple[Any, dict[str, Any]]:
    """What the metrics and what the log hear of one request."""
    seen: list[tuple[str, int, float]] = []

    async def send(message: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    with (folder / "log").open("wb") as file:
        lines = LineWriter(file.fileno(), report_dropped)
        logged = Spellings(AccessLog(app, "json", lambda *figures: seen.append(figures), lines))
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], "client": None}
        with contextlib.suppress(RuntimeError):
            asyncio.run(logged(scope, receive, send))
        lines.close(5)
    text = (folder / "log").read_text()
    return seen, json.loads(text) if text else {}


@pytest.mark.parametrize(
    ("app", "status", "num_bytes"), [(leaves, 499, 0), (fails, 500, 0), (breaks_off, 200, 10), (refuses, 503, 2)]
)
def test_log_and_metrics_say_the_same_status(app: ASGIApp, status: int, num_bytes: int, tmp_path: Path) -> None:
    [(route, seen, seconds)], line = reported(app, tmp_path)
    assert (route, seen) == ("unmatched", status)
    assert 0 <= seconds < 60
    assert (line["status"], line["bytes"], line["client"]) == (status, num_bytes, "-")


def test_head_is_logged_as_it_came(tmp_path: Path) -> None:
    _, line = reported(refuses, tmp_path, method="HEAD")
    assert line["method"] == "HEAD"


def test_a_probe_that_failed_has_a_line(tmp_path: Path) -> None:
    assert reported(refuses, tmp_path, "/health")[1]["status"] == 503
