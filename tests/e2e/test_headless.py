"""Replicas on other machines behind one server (`inflight serve --headless`), over loopback: they are killed, restarted and
refused, and no stream notices it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.shared.free_port import free_port
from tests.e2e.serve_process import SECONDS, ServeProcess, serving
from tests.e2e.test_recovery import OPTIONS, check_same, status_of, streams
from tests.support.waits import wait_until

NUM_STREAMS = 8
TOKEN = {"INFLIGHT_CLUSTER_TOKEN": "a token of this test"}


@contextlib.contextmanager
def headless(port: int, rank: int = 1, *options: str, token: dict[str, str] | None = None) -> Iterator[ServeProcess]:
    """A process that runs replica `rank` of two."""
    sizes = ["--headless", "-dp", "2", "-dpl", "1", "-dpr", str(rank), "-dpa", "127.0.0.1", "-dpp", str(port)]
    with serving(*OPTIONS, *sizes, *options, ready=False, **(token or TOKEN)) as node:
        yield node


@contextlib.contextmanager
def head(port: int, *options: str) -> Iterator[ServeProcess]:
    sizes = ["-dp", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1"]
    rpc = ["--data-parallel-rpc-port", str(port)]
    with serving(*OPTIONS, *sizes, *rpc, *options, ready=False, **TOKEN) as server:
        yield server


def wait_for_replicas(server: ServeProcess, is_right: Callable[[dict[str, str]], bool]) -> None:
    end = time.monotonic() + SECONDS
    found: Any = None
    while time.monotonic() < end:
        assert server.popen.poll() is None, server.text_of_log()
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(server.request("GET", "/ready")[1])
            if is_right(found.get("engines", {})):
                return
        time.sleep(0.05)
    raise AssertionError(f"/ready says {found}; {server.text_of_log()[-5000:]}")


def both(engines: dict[str, str]) -> bool:
    return engines == {"0": "ready", "1": "ready"}


def without_one(engines: dict[str, str]) -> bool:
    return engines == {"0": "ready", "1": "recovering"}


def completion(server: ServeProcess, replica: int) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    status, text = server.request("POST", "/v1/completions", body, {"X-Data-Parallel-Rank": str(replica)})
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["text"])


class Losses:
    """Checks that the lost replica had streams that were running, because otherwise its loss would show nothing. Another
    replica counts each sequence that it goes on with."""

    def __init__(self, server: ServeProcess) -> None:
        self._server, self._num_resumed = server, 0

    def check(self) -> None:
        end = time.monotonic() + SECONDS
        while (num_resumed := int(status_of(self._server)["num_resumed_requests"])) <= self._num_resumed:
            assert time.monotonic() < end, "no stream was at the lost replica"
            time.sleep(0.05)
        self._num_resumed = num_resumed


def test_a_replica_on_another_machine_is_lost_and_comes_back() -> None:
    port = free_port()
    with head(port) as server, contextlib.ExitStack() as nodes:
        node = nodes.enter_context(headless(port))
        wait_for_replicas(server, both)
        assert completion(server, 0) == completion(server, 1)
        losses = Losses(server)
        with streams(server, NUM_STREAMS) as futures:
            expected = [future.result() for future in futures]

        with streams(server, NUM_STREAMS) as futures:
            os.kill(node.children()["engine"], signal.SIGKILL)
        check_same([future.result() for future in futures], expected)
        losses.check()
        wait_for_replicas(server, both)  # its keeper has started it again
        assert "front_end_died" not in status_of(server)["num_recoveries"]

        with streams(server, NUM_STREAMS) as futures:
            node.popen.kill()
        check_same([future.result() for future in futures], expected)
        losses.check()
        wait_for_replicas(server, without_one)
        assert server.request("GET", "/health")[0] == 200
        # a chosen replica that is away is replaced
        assert completion(server, 1) == completion(server, 0)

        node = nodes.enter_context(headless(port))
        wait_for_replicas(server, both)
        assert completion(server, 1) == completion(server, 0)

        # the node of a planned end loses nothing, either
        with streams(server, NUM_STREAMS) as futures:
            node.popen.terminate()
        check_same([future.result() for future in futures], expected)
        losses.check()
        assert node.end() == 0, node.text_of_log()
        server.popen.terminate()
        assert server.end() == 0, server.text_of_log()


def test_who_may_not_join_and_who_may_not_listen() -> None:
    port = free_port()
    with head(port) as server, contextlib.ExitStack() as nodes:

        def start(rank: int, *options: str, token: dict[str, str] | None = None) -> ServeProcess:
            return nodes.enter_context(headless(port, rank, *options, token=token))

        wrong = {
            "its INFLIGHT_CLUSTER_TOKEN is not the same as": start(1, token={"INFLIGHT_CLUSTER_TOKEN": "another"}),
            "dtype is bfloat16 at the replica, float32 at the head": start(1, "--dtype", "bfloat16"),
        }
        for reason, node in wrong.items():
            assert node.end() == 2, node.text_of_log()
            assert reason in node.text_of_log()
            wait_until(lambda: reason in server.text_of_log(), server.text_of_log)  # noqa: B023
            assert "Traceback" not in node.text_of_log()
        node = start(0)
        assert node.end() == 2
        assert "the head expects no new replica 0 (1 is missing); give" in node.text_of_log()
        with head(port) as second:
            assert second.end() == 2
            assert f"the head cannot listen on 127.0.0.1:{port} (data_parallel_address" in second.text_of_log()
        node = start(1, "--kv-cache-memory-bytes", "1000")  # it fits to the head, but cannot start
        assert node.end() == 1, node.text_of_log()
        wait_until(lambda: "engine 1 could not start: " in server.text_of_log(), server.text_of_log)
        assert server.popen.poll() is None
        start(1)
        wait_for_replicas(server, both)


def replace_front_end(server: ServeProcess, number: int) -> None:
    os.kill(server.children()[f"front end {number}"], signal.SIGKILL)
    end = time.monotonic() + SECONDS
    while f"front end {number} is ready again" not in server.text_of_log():
        assert time.monotonic() < end, server.text_of_log()
        time.sleep(0.1)


def test_several_front_ends_use_a_replica_on_another_machine() -> None:
    port = free_port()
    with head(port, "--api-server-count", "2") as server, contextlib.ExitStack() as nodes:
        node = nodes.enter_context(headless(port))
        wait_for_replicas(server, both)
        texts = {completion(server, replica) for replica in (0, 1) for _ in range(3)}
        assert len(texts) == 1
        replace_front_end(server, 1)
        losses = Losses(server)
        assert {completion(server, replica) for replica in (0, 1) for _ in range(6)} == texts
        with streams(server, NUM_STREAMS // 2) as futures:
            expected = [future.result() for future in futures]
        with streams(server, NUM_STREAMS // 2) as futures:
            node.popen.kill()
        check_same([future.result() for future in futures], expected)
        losses.check()
        replace_front_end(server, 0)  # it does not wait for the lost replica
        wait_for_replicas(server, without_one)
        nodes.enter_context(headless(port))
        for _ in range(8):  # both front ends have it
            wait_for_replicas(server, both)
        assert {completion(server, replica) for replica in (0, 1) for _ in range(6)} == texts
