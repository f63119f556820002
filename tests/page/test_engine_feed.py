"""The feed of a real engine, and its view in a browser: what is told is true, and watching changes no token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.interface.engine_view import COLUMNS
from tests.e2e.openai_server import demo_args, running_server, wait_until_idle
from tests.e2e.serve_process import serving
from tests.support.browser import browser, needs_browser, until

pytestmark = pytest.mark.timeout(600)
LONG = {"prompt": "Hello there", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


class Watcher:
    """Reads the feed in a thread, and keeps its events."""

    def __init__(self, url: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.times: list[float] = []
        host, _, port = url.removeprefix("http://").partition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=120)
        self._connection.request("GET", "/v1/engine/live")
        self._response = self._connection.getresponse()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for line in self._response:
                if line.startswith(b"data: "):
                    self.times.append(time.monotonic())
                    self.events.append(json.loads(line[6:]))

    def close(self) -> None:
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._response.close()
        self._connection.close()

    def all_of(self, member: str) -> list[Any]:
        return [news[member] for event in list(self.events) for news in event["engines"] if member in news]


@contextmanager
def watching(url: str) -> Iterator[Watcher]:
    watcher = Watcher(url)
    try:
        until(lambda: watcher.all_of("blocks"), "the first view")
        yield watcher
    finally:
        watcher.close()


def test_what_is_told_is_true_and_no_token_changes() -> None:
    with running_server() as server:
        alone = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=300).json()
        httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()
        with watching(server.url) as watcher:
            watched = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=300).json()
            until(lambda: watcher.all_of("gone"), "the end to be told")
            text = json.dumps(watcher.events)
        assert watched["choices"] == alone["choices"]
        ((name, *_),) = watcher.all_of("gone")
        rows = [dict(zip(COLUMNS, row[name], strict=True)) for row in watcher.all_of("requests") if name in row]
        assert all(row["prompt"] == watched["usage"]["prompt_tokens"] for row in rows)
        emitted = [row["emitted"] for row in rows]
        assert emitted == sorted(emitted) and emitted[-1] <= LONG["max_tokens"]  # type: ignore[operator]
        assert all(row["blocks"] == -(-row["computed"] // 16) or row["computed"] % 16 in (0, 15) for row in rows)
        assert watched["choices"][0]["text"][:20] not in text and "Hello there" not in text
        spans = [span for spans in watcher.all_of("spans") for span in spans]
        assert {"plan", "commit", "forward", "sample"} <= {span[1] for span in spans} and {
            span[0] for span in spans
        } == {0, 1}
        assert len({tuple(span) for span in spans}) == len(spans)
        gaps = [after - before for before, after in zip(watcher.times, watcher.times[1:], strict=False)]
        assert len(gaps) < 11 * (watcher.times[-1] - watcher.times[0]) + 2
        # nobody watches any more, so the engine makes no views
        (client,) = server.engine.engines
        until(lambda: not client.views._takers, "the watcher to be gone")
        time.sleep(0.5)
        seen: list[object] = []
        client.views._takers.append(seen.append)
        httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=300).raise_for_status()
        assert seen == []
        client.views._takers.clear()


def test_a_request_of_another_client_can_be_ended() -> None:
    with running_server() as server, watching(server.url) as watcher:
        answers: list[httpx.Response] = []
        long = {**LONG, "max_tokens": 900}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=long, timeout=300))
        )
        asking.start()
        until(lambda: watcher.all_of("requests"), "the request")
        (name,) = watcher.all_of("requests")[-1]
        done = httpx.post(f"{server.url}/v1/engine/abort", json={"request_id": name})
        assert (done.status_code, done.json()) == (200, {"status": "ended"})
        asking.join()
        (answer,) = answers
        assert (
            answer.status_code == 400
            and "who runs the server has ended the request" in answer.json()["error"]["message"]
        )
        until(lambda: watcher.all_of("gone"), "the end to be told")
        wait_until_idle(server)
        again = httpx.post(f"{server.url}/v1/engine/abort", json={"request_id": name})
        assert (again.status_code, again.json()["error"]["param"]) == (404, "request_id")


def test_the_progress_of_a_prompt_is_told_and_changes_no_token() -> None:
    with running_server(demo_args(max_num_batched_tokens=16, max_num_seqs=4)) as server:
        words = " ".join(f"word{i}" for i in range(120))
        asked = {"messages": [{"role": "user", "content": words}], "temperature": 0, "max_tokens": 8, "stream": True}

        def events(**more: bool) -> list[dict[str, Any]]:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json={**asked, **more}, timeout=300)
            return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

        told = events(return_progress=True)
        httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()
        plain = events()
        progress = [event["prompt_progress"] for event in told if "prompt_progress" in event]
        processed = [each["processed"] for each in progress]
        assert processed == sorted(set(processed)) and processed[0] == 0 and len(processed) > 1
        assert all(each["processed"] <= each["total"] for each in progress)
        assert text_of(told) == text_of(plain) != "" and not any("prompt_progress" in event for event in plain)


def text_of(events: list[dict[str, Any]]) -> str:
    """The answer. How many tokens an event has depends on the machine."""
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


@contextmanager
def load(url: str) -> Iterator[list[str]]:
    """Some requests that follow one another, until the `with` block ends. Gives the answers that are errors."""
    ends = threading.Event()
    failed: list[str] = []

    def ask(index: int) -> None:
        body = {**LONG, "prompt": f"Hello {index % 3} " * 30}
        while not ends.is_set():
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
            failed.extend([] if answer.status_code == 200 else [answer.text])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        ends.set()
        for thread in threads:
            thread.join()


@needs_browser
def test_one_sees_a_rank_die_and_no_request_be_lost(tmp_path: Path) -> None:
    options = ("--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "32M", "--num-threads", "1")
    with serving(*options) as process, browser() as window:
        url = f"http://127.0.0.1:{process.port}"
        window.open(f"{url}/#engine")
        window.wait_for_text(".replica p[role=status]", "2 ranks")
        with load(url) as failed:
            until(lambda: window.count(".replica tbody tr") >= 3, "the requests")
            until(lambda: "0 owned" not in window.text(".replica .legend"), "blocks in use")
            until(lambda: "forward" in window.text("section[aria-label=Timeline] .legend"), "the ranks in the timeline")
            window.screenshot(tmp_path / "engine.png")
            rank = next(pid for title, pid in process.children().items() if title.startswith("worker tp"))
            os.kill(rank, signal.SIGKILL)
            window.wait_for_text(".replica p[role=status]", "recoveries: rank_died 1")
            window.wait_for_text(".replica .problem", "rank")
            window.wait_for_text(".replica p[role=status]", "healthy")
            until(lambda: window.count(".replica tbody tr") >= 3, "the requests again")
            assert failed == []
            window.click(".replica tbody button")
            until(lambda: failed, "a request to end")
            assert "who runs the server has ended the request" in failed[0]
            window.run("location.hash = '#chat'")
        assert window.errors() == []
