"""The engine's process dies or is stopped while streams run: every stream ends as it does without the fault."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.serve_process import MODEL, ServeProcess, serving
from tests.support.waits import wait_until

OPTIONS = ("--dtype", "float32", "--num-threads", "1", "--seed", "1", "--max-num-seqs", "16")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": SCHEMA, "strict": True}}
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
SAMPLED: dict[str, Any] = {**LONG, "temperature": 0.9, "seed": 7}
KINDS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {**LONG, "temperature": 0}),
    (COMPLETION, SAMPLED),
    (COMPLETION, {**LONG, "temperature": 0.8, "n": 2, "seed": 3}),
    (COMPLETION, {**SAMPLED, "logprobs": 2, "min_tokens": 300}),
    (COMPLETION, {**SAMPLED, "stop": ["never said", "the the the", ". The"], "min_tokens": 100}),
    (COMPLETION, {**LONG, "temperature": 0, "presence_penalty": 0.5, "repetition_penalty": 1.1}),
    (
        CHAT,
        {
            "max_tokens": 200,
            "temperature": 1.0,
            "seed": 5,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        },
    ),
    (CHAT, {"max_tokens": 200, "temperature": 1.0, "seed": 6, "tools": [TOOL], "tool_choice": "required"}),
]


def body_of(index: int) -> tuple[str, dict[str, Any]]:
    path, fields = KINDS[index % len(KINDS)]
    text = f"Tell me a story about {index} foxes."
    prompt = {"prompt": text} if path == COMPLETION else {"messages": [{"role": "user", "content": text}]}
    return path, {"model": MODEL, "stream": True, **prompt, **fields}


class Answer:
    """What the client of one stream has read: the parts of all choices, and the longest silence."""

    def __init__(self) -> None:
        self.parts: dict[int, list[str]] = {}
        self.logprobs: list[float] = []
        self.errors: list[Any] = []
        self.silence = 0.0

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
        for choice in event.get("choices", ()):
            parts = self.parts.setdefault(choice["index"], ["", "", ""])
            delta = choice.get("delta", {})
            parts[0] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                parts[1] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            parts[2] = choice["finish_reason"] or parts[2]
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()


def read(server: ServeProcess, index: int, started: threading.Semaphore | None = None) -> Answer:
    path, body = body_of(index)
    answer = Answer()
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, (index, response.status, response.read())
        last = 0.0
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            if last:
                answer.silence = max(answer.silence, now - last)
            elif started is not None:
                started.release()
            last = now
            answer.take(json.loads(line.removeprefix(b"data: ")))
    return answer


@contextlib.contextmanager
def streams(server: ServeProcess, count: int = len(KINDS)) -> Iterator[list[Future[Answer]]]:
    """All have had their first event."""
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(read, server, index, started) for index in range(count)]
        for future in futures:
            future.add_done_callback(lambda done: done.exception() and started.release())  # no event will come
        for _ in range(count):
            started.acquire(timeout=300)
        yield futures


def status_of(server: ServeProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.request("GET", "/fault_tolerance/status")[1])
    return found


def check_same(found: list[Answer], expected: list[Answer]) -> None:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert not ours.errors, (index, ours.errors)
        assert ours.parts == theirs.parts, index
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


RAY = pytest.param(("-tp", "2", "--distributed-executor-backend", "ray"), marks=pytest.mark.full, id="ray-tp2")


@pytest.mark.parametrize("layout", [pytest.param((), id="one-rank"), RAY])
def test_no_stream_notices_that_the_engine_died(layout: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    if layout:
        request.getfixturevalue("ray_cluster")
    with serving(*OPTIONS, *layout) as server:
        with streams(server) as futures:
            expected = [future.result() for future in futures]
        check_same(expected, [read(server, index) for index in range(4)] + expected[4:])
        for number_of_recoveries, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            with streams(server) as futures:
                os.kill(server.children()["engine"], number)
                count = {"engine_died": number_of_recoveries}
                # the recovery may end between two looks
                wait_until(
                    lambda: server.request("GET", "/ready")[0] == 503 or status_of(server)["num_recoveries"] == count,  # noqa: B023
                    server.text_of_log,
                )
                code, text = server.request("GET", "/ready")
                if code == 503:
                    error = json.loads(text)["error"]
                    assert error["code"] == "engine_recovering", text
                    # strangers may ask, so no process, path or request is named
                    assert error["message"] == "the engine recovers from a fault (engine_died)"
                    assert status_of(server)["state"] == "recovering"
                for path in ("/live", "/health"):
                    assert server.request("GET", path)[0] == 200
                late = read(server, 1)  # a new request waits
                answers = [future.result() for future in futures]
            check_same([*answers, late], [*expected, expected[1]])
            status = status_of(server)
            assert status["state"] == "healthy"
            assert status["num_recoveries"] == count
            assert status["num_resumed_requests"] >= len(KINDS) / 2
            assert "SIGKILL" in status["last_cause"] and status["last_kind"] == "engine_died"
            print(f"{number.name}: longest silence {max(each.silence for each in answers):.2f} s, {status}")
        metrics = server.request("GET", "/metrics")[1]
        assert 'inflight:recoveries_total{cause="engine_died",model_name="tested"} 2.0' in metrics
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_requests_in_flight_fail_if_they_may_not_resume() -> None:
    config = '{"resume_requests_after_recovery": false, "max_recoveries": 1}'
    with serving(*OPTIONS, "--fault-tolerance-config", config) as server:
        with streams(server, 4) as futures:
            os.kill(server.children()["engine"], signal.SIGKILL)
            errors = [future.result().errors for future in futures]
        assert [error["code"] for each in errors for error in each] == ["engine_recovering"] * 4
        assert read(server, 0).parts[0][2] == "length"
        os.kill(server.children()["engine"], signal.SIGKILL)  # one more than `max_recoveries`
        assert server.end() == 1
        assert "max_recoveries" in server.text_of_log()


def test_two_front_ends_resume_their_requests() -> None:
    with serving(*OPTIONS, "--api-server-count", "2") as server:
        with streams(server) as futures:
            expected = [future.result() for future in futures]
        with streams(server) as futures:
            os.kill(server.children()["engine"], signal.SIGKILL)
            check_same([future.result() for future in futures], expected)
        assert status_of(server)["num_recoveries"] == {"engine_died": 1}


def test_an_unknown_field_ends_the_command_with_the_nearest_name() -> None:
    with serving("--fault-tolerance-config", '{"recoveries": 3}', ready=False) as server:
        assert server.end() == 2
        assert "did you mean 'max_recoveries'" in server.text_of_log().replace("\n", " ")
