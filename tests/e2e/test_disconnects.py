"""Clients that go at any moment: while they still send, while their request waits, in the middle of a prompt or of an answer.

Nothing of them is left: no sequence, no KV block, no task and no descriptor, soon. `INFLIGHT_TEST_FULL=1`: 1,000.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.conftest import FULL
from tests.e2e.openai_server import RunningServer, demo_args, running_server

NUM_CLIENTS = 1000 if FULL else 150
AT_ONCE = 12  # clients at a time: more than the engine has places for, so that some of them wait
SEED = 20261
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION: dict[str, Any] = {"prompt": "What is 47 + 38?", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # four places, and prompts in pieces of 64 tokens: queue, prefill and decode all last
    with running_server(demo_args(max_num_seqs=4, max_num_batched_tokens=64)) as running:
        yield running


def make_body(choose: random.Random) -> tuple[str, dict[str, Any]]:
    words = " ".join(f"{choose.randrange(1000)}" for _ in range(choose.choice([3, 30, 400])))
    common: dict[str, Any] = {"stream": choose.random() < 0.6, "ignore_eos": True, "max_tokens": 200}
    common.update(n=choose.randint(1, 3), temperature=0.9, seed=choose.randrange(100))
    if choose.random() < 0.3:
        return CHAT, {**common, "messages": [{"role": "user", "content": words}]}
    prompts = [f"{i} {words}" for i in range(choose.randint(2, 4))]
    return TEXT, {**common, "prompt": prompts if choose.random() < 0.4 else words}


def go_away(address: tuple[str, int], choose: random.Random) -> str:
    """Send a request or a part of it, wait a little or for the first events, and cut the connection. Returns how far it got."""
    path, body = make_body(choose)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    request = head.encode() + content
    with socket.create_connection(address, 300) as connection:
        # closed with a reset, or in order
        if choose.random() < 0.7:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if choose.random() < 0.15:
            connection.sendall(request[: choose.randrange(1, len(request))])
            return "while it sent"
        connection.sendall(request)
        if choose.random() < 0.5 and body["stream"]:
            for _ in range(choose.randint(1, 4)):
                assert connection.recv(4096)
            return "while it read"
        time.sleep(choose.choice([0.0, 0.002, 0.02, 0.1]))
        return "while it waited"


def leftovers(server: RunningServer) -> dict[str, int]:
    """Tasks of the server's event loop, and descriptors of the process."""

    async def count() -> int:
        return len(asyncio.all_tasks())

    tasks = asyncio.run_coroutine_threadsafe(count(), server.loop).result(300)
    return {"tasks": tasks, "descriptors": len(os.listdir("/proc/self/fd"))}


def engine_counts(server: RunningServer) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", timeout=300, headers={"connection": "close"}).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("inflight:")]
    found = {name.partition("{")[0].removeprefix("inflight:"): float(value) for name, _, value in lines}
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: found[name] for name in names}


def test_nothing_is_left_of_clients_that_go(server: RunningServer) -> None:
    seed = secrets.randbelow(2**32) if FULL else SEED
    print(f"seed: {seed}")
    url = httpx.URL(server.url)
    assert url.port is not None
    address = (url.host, url.port)
    answer = httpx.post(server.url + TEXT, json=QUESTION, timeout=300, headers={"connection": "close"}).json()
    before = leftovers(server)
    peak = {"num_requests_running": 0.0, "num_requests_waiting": 0.0}
    with ThreadPoolExecutor(AT_ONCE) as threads:
        clients = [threads.submit(go_away, address, random.Random(seed + i)) for i in range(NUM_CLIENTS)]
        while not all(client.done() for client in clients):
            counts = engine_counts(server)
            peak = {name: max(peak[name], counts[name]) for name in peak}
            time.sleep(0.05)
        ways = [client.result() for client in clients]
    seconds = seconds_until_nothing_is_left(server, before)
    print({way: ways.count(way) for way in set(ways)}, peak, f"{seconds:.3f} s to the baseline")
    assert all(peak.values()), peak
    assert seconds < 60
    assert len(server.engine._requests) == 0
    again = httpx.post(server.url + TEXT, json=QUESTION, timeout=300).json()
    assert again["choices"] == answer["choices"]


def seconds_until_nothing_is_left(server: RunningServer, before: dict[str, int]) -> float:
    begin = time.monotonic()
    while True:
        counts, left = engine_counts(server), leftovers(server)
        if not any(counts.values()) and all(left[name] <= before[name] for name in before):
            return time.monotonic() - begin
        assert time.monotonic() - begin < 60, (counts, left, before)
        time.sleep(0.02)
