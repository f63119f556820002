"""`inflight serve` with two ranks: one dies, hangs, or fails in a step. The engine recovers, and the tokens are the same.

Without fault tolerance the server says at once what has failed, and ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.robustness.fault_server import is_fork_server
from tests.e2e.faulty_executor import UNLUCKY
from tests.e2e.faulty_executor import __name__ as faulty
from tests.e2e.serve_process import MODEL, ServeProcess, Stream, assert_nothing_left, events_of, serving, tree_of
from tests.support.fork_server import current_fork_server
from tests.support.processes import parent
from tests.support.served_image_model import data_url, picture, write_served_image_model
from tests.support.waits import wait_until

TWO_RANKS = ["--tensor-parallel-size", "2", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 24)]
NO_RECOVERY = "--no-enable-fault-tolerance"
FAULTY = f"{faulty}:FaultyExecutor"
NUM_VECTORS = 200  # texts of a call; it must run for longer than a fault needs to come


def complete(server: ServeProcess, first_token: int) -> tuple[int, Any]:
    body = {"model": MODEL, "prompt": [first_token, 4, 5], "max_tokens": 4}
    status, text = server.request("POST", "/v1/completions", body)
    return status, json.loads(text)


def assert_dead(server: ServeProcess, summary: str) -> None:
    """From now on nobody is told that the server is well; it ends, with an exit code that starts it anew."""
    pids = tree_of(server.popen.pid)
    while server.popen.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert server.request("GET", "/health")[0] == 503
            assert server.request("GET", "/ready")[0] == 503
            status, body = complete(server, 3)
            assert status == 503
            assert body["error"]["code"] in ("engine_dead", "server_dead")
            assert body["error"]["code"] == "server_dead" or summary in body["error"]["message"]
    assert server.end() == 1
    assert_nothing_left(pids, set())
    assert len(server.text_of_log()) < 20_000


def text_of(stream: Stream) -> str:
    """The text of a stream, which must not have ended with an error."""
    events = events_of(stream.rest())
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def vectors_of(server: ServeProcess, count: int) -> list[str]:
    """As base64, so that equal ones are the same bit for bit."""
    texts = [f"{index} foxes in the forest " * (1 + index % 9) for index in range(count)]
    body = {"model": MODEL, "input": texts, "encoding_format": "base64"}
    status, text = server.request("POST", "/v1/embeddings", body)
    assert status == 200, text
    return [each["embedding"] for each in json.loads(text)["data"]]


def num_running(server: ServeProcess) -> int:
    text = server.request("GET", "/metrics")[1]
    return round(float(re.findall(r"^inflight:num_requests_running.* (\S+)$", text, re.MULTILINE)[0]))


TP, PP = "--tensor-parallel-size", "--pipeline-parallel-size"


# without "full": a rank that is stopped is found in the same way whichever it is
@pytest.mark.parametrize(
    ("layout", "victim", "fault"),
    [
        (TP, "worker tp1 pp0", signal.SIGKILL),
        (TP, "worker tp0 pp0", signal.SIGKILL),
        (PP, "worker tp0 pp1", signal.SIGKILL),
        (TP, "worker tp1 pp0", signal.SIGSTOP),
        pytest.param(TP, "worker tp0 pp0", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param(PP, "worker tp0 pp1", signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_a_lost_rank_is_replaced_and_the_streams_go_on(layout: str, victim: str, fault: signal.Signals) -> None:
    """And the embeddings beside them are the same, bit for bit, and none is lost."""
    with serving(layout, "2", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 24)) as server:
        truth, vectors = text_of(server.start_stream(300)), vectors_of(server, NUM_VECTORS)
        pids = server.children()
        with ThreadPoolExecutor(2) as threads:
            streams = [server.start_stream(300) for _ in range(3)]
            embeddings = [threads.submit(vectors_of, server, NUM_VECTORS) for _ in range(2)]
            wait_until(lambda: num_running(server) > len(streams) or all(each.done() for each in embeddings))
            assert not all(each.done() for each in embeddings)
            os.kill(pids[victim], fault)
            assert [text_of(stream) for stream in streams] == [truth] * 3
            assert [each.result() for each in embeddings] == [vectors] * 2
        assert complete(server, 3)[0] == 200
        now = server.children()
        changed = [title for title in pids if title.startswith("worker") and now[title] != pids[title]]
        assert changed == [victim]
        log = server.text_of_log()
        assert "the engine has recovered in" in log
        assert "new ranks: 1" in log or "new ranks: 0" in log


def test_processes_of_a_tested_server_are_forked() -> None:
    """Otherwise the tests take many minutes longer, and nobody is told why."""
    forking = current_fork_server()
    assert forking is not None
    assert forking.wait_until_ready(300)
    with serving(*TWO_RANKS) as server:
        for title, pid in server.children().items():
            assert is_fork_server(parent(pid)), title


def test_a_request_that_fails_each_step_ends_alone_with_status_500() -> None:
    with serving(*TWO_RANKS, "--distributed-executor-backend", FAULTY) as server:
        truth = text_of(server.start_stream(300))
        pids = server.children()
        stream = server.start_stream(300)
        status, body = complete(server, UNLUCKY)
        assert status == 500
        assert "secret" not in json.dumps(body)
        assert text_of(stream) == truth
        assert complete(server, 3)[0] == 200
        assert server.children() == pids


def test_a_request_with_an_image_goes_on_when_a_rank_is_killed(tmp_path: Path) -> None:
    """The new rank has no embeddings of the image, so it is encoded again."""
    folder = write_served_image_model(tmp_path / "model", max_position_embeddings=1024)
    picture_part = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
    content = [picture_part, {"type": "text", "text": "What is it?"}]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "max_tokens": 300,
        "ignore_eos": True,
        "temperature": 0,
    }
    with serving(*TWO_RANKS, "--model", str(folder)) as server:

        def answer(*, fault: bool) -> str:
            with contextlib.closing(server.connect()) as connection:
                connection.request(
                    "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                assert response.status == 200, response.read()
                first = [response.readline() for _ in range(8)]
                if fault:
                    os.kill(server.children()["worker tp1 pp0"], signal.SIGKILL)
                lines = [*first, *response.readlines()]
            events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
            assert not any("error" in event for event in events), events[-1]
            return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])

        truth = answer(fault=False)
        assert len(truth) > 100
        assert answer(fault=True) == truth
        wait_until(lambda: "the engine has recovered in" in server.text_of_log(), server.text_of_log)


def test_a_spare_process_takes_the_place_of_a_rank() -> None:
    with serving(*TWO_RANKS, "--fault-tolerance-config", '{"spare_workers": 1}') as server:
        truth = text_of(server.start_stream(300))
        spare = server.wait_for_child("worker spare")
        stream = server.start_stream(300)
        os.kill(server.children()["worker tp1 pp0"], signal.SIGKILL)
        assert text_of(stream) == truth
        wait_until(lambda: server.children().get("worker tp1 pp0") == spare, server.text_of_log)
        assert server.wait_for_child("worker spare") != spare


def test_a_spare_engine_and_its_processes_take_the_place_of_the_engine_and_its_ranks() -> None:
    with serving(*TWO_RANKS, "--fault-tolerance-config", '{"spare_workers": 1}') as server:
        truth = text_of(server.start_stream(300))
        spares = {server.wait_for_child("spare engine"), server.wait_for_child("spare engine worker")}
        stream = server.start_stream(300)
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert text_of(stream) == truth
        titles = ("engine", "worker tp0 pp0", "worker tp1 pp0")
        # the stream may have ended before the engine was killed
        wait_until(lambda: spares <= {server.children().get(title) for title in titles}, server.text_of_log)
        assert server.wait_for_child("spare engine") not in spares


def test_without_fault_tolerance_a_step_that_fails_on_one_rank_ends_the_server_and_is_named() -> None:
    with serving(*TWO_RANKS, NO_RECOVERY, "--distributed-executor-backend", FAULTY) as server:
        assert complete(server, 3)[0] == 200
        stream = server.start_stream(2000)
        status, body = complete(server, UNLUCKY)
        summary = "the engine has failed: a step failed on rank 1 (ValueError)"
        assert (status, body["error"]["code"], body["error"]["message"]) == (503, "engine_dead", summary)
        assert_dead(server, summary)
        assert events_of(stream.rest())[-1]["error"]["message"] == summary
        log = server.text_of_log()
        assert "failed on rank 1: ValueError: bad luck in /a/secret/path\n    Traceback" in log
        assert log.count("The plan was:") == 1
        assert "error: the engine has failed: step " in log.splitlines()[-1]


def test_without_fault_tolerance_a_rank_that_hangs_is_found_within_the_budget_and_is_named() -> None:
    budget = 8.0
    with serving(*TWO_RANKS, NO_RECOVERY, INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS=str(budget)) as server:
        assert complete(server, 3)[0] == 200
        pid = server.children()["worker tp1 pp0"]
        with ThreadPoolExecutor(1) as pool:
            stream = server.start_stream(2000)
            os.kill(pid, signal.SIGSTOP)
            start = time.monotonic()
            events = pool.submit(stream.rest).result(300)
        seconds = time.monotonic() - start
        summary = "the engine has failed: rank 1 did not answer in time"
        assert events_of(events)[-1]["error"]["message"] == summary
        assert seconds < budget + 150
        assert_dead(server, summary)
        log = server.text_of_log()
        assert f"from rank 1 (process {pid} is stopped by a signal; does not say what it is doing; answered step" in log
        # if rank 1 stopped after its last exchange with rank 0 in this step, rank 0 has replied and is not named
        if ", rank 0 (" in log:
            # it waits in a sum of the forward, or where the parts of the logits meet
            waits = r", rank 0 \(running step[^)]* of step \d+ for .* s, waiting for another rank\)"
            assert re.search(waits, log)
